"""A running server, for programs and for `rl serve`.

Shutdown order: the router (see there), then the replicas, then Ray if it was started
for the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from pydantic import SecretStr

from rl_distributed.access.bound_socket import bound_socket, url_of
from rl_distributed.access.door import is_loopback
from rl_distributed.access.key_file import KeyFile
from rl_distributed.access.listener_tls import server_context
from rl_distributed.cluster.start import init_ray, shutdown_ray
from rl_distributed.errors import ConfigError
from rl_distributed.security.audit import audited
from rl_models.checkpoint.hub import check_hub_name
from rl_models.checkpoint.model_folder import check_model_folder, read_model_config
from rl_models.serving.balancer import Endpoint
from rl_models.serving.config import DType, ServeConfig
from rl_models.serving.engine_choice import with_engine
from rl_models.serving.fleet import Fleet, Process, UpdateReport
from rl_models.serving.folder_weights import FolderWeights, ModelShape
from rl_models.serving.weights_root import WeightsRoot, within_checkpoint

if TYPE_CHECKING:
    from rl_models.serving.router import Router

__all__ = ["Server", "serve"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOOP_S = 10.0


class Server:
    """Serves a model by OpenAI's HTTP interface until it is stopped.

    Args:
        model: Folder or hub name; a checkpoint of a run is taken as well.
        config: Where to listen, how many replicas, what to allow.

    Raises:
        ModelLoadError: The folder is missing or incomplete.
        ConfigError: A setting is impossible.
    """

    def __init__(
        self, model: str | os.PathLike[str], config: ServeConfig | None = None
    ) -> None:
        self.config = with_engine(config or ServeConfig())
        folder = check_model_folder(within_checkpoint(model))
        if folder is None:
            check_hub_name(str(model))
        self.model = str(model) if folder is None else str(folder.resolve())
        self.model_name = self.config.model_name or _name_of(str(model), folder)
        self.config.generation()
        self._shape = None if folder is None else ModelShape.of(folder)
        self._dtype = self.config.dtype
        if folder is not None and self._dtype == "auto":
            self._dtype = _dtype_of(folder)
        self.api_key = _revealed(self.config.api_key)
        """The key of clients; None: none is needed."""
        self.has_generated_key = False
        """Whether the key was generated here, and has to be shown to the user."""
        keys_file = self.config.keys_file
        self._key_file = None if keys_file is None else KeyFile(keys_file)
        if self._key_file is not None:
            self._key_file.check()
        self._tls = server_context(self.config.tls, self.config.host)
        # Never open to the network: anybody could use the model, and its GPU.
        is_open = self.api_key is None and self._key_file is None
        if is_open and not is_loopback(self.config.host):
            self.api_key = secrets.token_urlsafe(24)
            self.has_generated_key = True
        root = self.config.weights_root
        self._weights_root = None if root is None else WeightsRoot(root)
        self.url = ""
        """Its address, once it is started."""
        self._replica_key = secrets.token_urlsafe(24)
        self._listener: socket.socket | None = None
        self._router: Router | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._owns_ray = False
        self._is_stopped = False
        self.hopeless = threading.Event()
        """Set once no replica is left and none will be started."""
        self._fleet = Fleet(
            self._launch,
            self.config.num_replicas,
            on_up=self._on_up,
            on_down=self._on_down,
            on_hopeless=self._on_hopeless,
            max_restarts=self.config.max_restarts,
        )

    def start(self) -> Server:
        """Start the replicas and begin to answer; does nothing if it is started.

        Raises:
            ConfigError: The port is taken.
            ActorEnvironmentError: The environment of the engine cannot be had.
            DistributedError: A replica does not come up.
        """
        if self._router is not None:
            return self
        try:
            with audited("serve.start", self.model_name):
                self._start_router(self.bind())
                self._start_replicas()
        except BaseException:
            self.stop(0.0)
            raise
        return self

    def bind(self) -> socket.socket:
        """Bind the port before anything slow is begun.

        Raises:
            ConfigError: It is taken, or the address is not one of this machine.
        """
        if self._listener is None:
            self._listener = bound_socket(self.config.host, self.config.port)
        return self._listener

    def _start_router(self, listener: socket.socket) -> None:
        router_class = _router_class()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="router", daemon=True
        )
        self._thread.start()
        router = router_class(
            self.config,
            self,
            api_key=self.api_key,
            weights_key=_revealed(self.config.weights_key),
            weights_root=self._weights_root,
            replica_key=self._replica_key,
            key_file=self._key_file,
            tls=self._tls,
        )
        self._run(router.start(listener))
        self._router = router
        self.url = url_of(listener, tls=self._tls is not None)

    def _start_replicas(self) -> None:
        from rl_models.serving.ray_process import engine_environment  # noqa: PLC0415

        if self.config.engine == "vllm":
            # Once, and before the deadline of the replicas' start counts.
            engine_environment().prepare()
        count = max(os.cpu_count() or 1, self.config.num_replicas)
        local = os.environ.get("RAY_ADDRESS", "local") == "local"
        self._owns_ray = init_ray(count if local else None)
        self._fleet.start(self.config.start_deadline_s)

    def stop(self, drain_s: float | None = None) -> bool:
        """Stop listening, end requests and replicas; may be called more than once.

        A KeyboardInterrupt while it waits for requests ends them at once.

        Args:
            drain_s: How long requests in progress may go on; None: as the settings say.

        Returns:
            Whether all requests came to their own end.
        """
        if self._is_stopped:
            return True
        self._is_stopped = True
        wait_s = self.config.drain_deadline_s if drain_s is None else drain_s
        clean = True
        try:
            if self._router is not None:
                clean = self._drain(self._router, wait_s)
        finally:
            # After the router, which may still forward requests; before its loop, which
            # the fleet's threads report to.
            self._fleet.stop()
            if self._router is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_LOOP_S)
                self._loop.close()
            if self._listener is not None:
                self._listener.close()
            if self._owns_ray:
                shutdown_ray()
        return clean

    def _drain(self, router: Router, wait_s: float) -> bool:
        ending = asyncio.run_coroutine_threadsafe(router.stop(wait_s), self._loop)
        try:
            return ending.result(wait_s + _LOOP_S)
        except KeyboardInterrupt:
            # A second Ctrl-C: do not wait for requests, but still end in order.
            self._loop.call_soon_threadsafe(router.hurry)
            return ending.result(_LOOP_S)

    def __enter__(self) -> Server:
        """Start it."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it; after an error at once."""
        self.stop(None if kind is None else 0.0)

    # --- for those who run it -----------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Replicas, their states and the versions of their weights, as JSON values."""
        return {"model": self.model_name, **self._fleet.status()}

    def update_weights(
        self,
        path: str | os.PathLike[str],
        version: int | None = None,
        *,
        by: str = "program",
    ) -> UpdateReport:
        """Give all replicas the weights of another model folder.

        The folder is read and checked first; then all replicas stop in mid-answer, load
        it, compare every tensor with what was read, drop what they had computed under
        the old weights, and go on. A replica that fails is ended and replaced.

        Args:
            path: Folder of the same model with other weights.
            version: What answers call them; None: one more than before.
            by: Name of the requester in the audit log.

        Raises:
            ModelLoadError: The folder is incomplete or of another model; nothing was
                changed.
            ConfigError: The version is not above the present one; likewise.
            GenerationError: No replica is up.
        """
        if self._shape is None:
            raise ConfigError(
                f"the weights of {self.model!r} can be updated only where it is served "
                "from a folder: download the model, and serve that folder"
            )
        with audited("serve.weights", str(path), version=version, by=by):
            weights = FolderWeights.read(within_checkpoint(path))
            self._shape.check(weights)
            return self._fleet.update_weights(weights, version)

    def report_lost(self, endpoint: Endpoint, reason: str) -> None:
        """Have a process of a replica ended and replaced; for the router."""
        self._fleet.report_lost(endpoint.replica, endpoint.url, reason)

    # --- between the fleet's threads and the router's -----------------------------

    def _launch(self, replica: int) -> Process:
        from rl_models.serving.ray_process import RayProcess  # noqa: PLC0415

        return RayProcess(
            replica,
            self.config.model_copy(update={"dtype": self._dtype}),
            self.model,
            self.model_name,
            self._replica_key,
        )

    def _on_up(self, replica: int, url: str) -> None:
        assert self._router is not None
        endpoint = Endpoint(replica, url)
        self._endpoints[url] = endpoint
        self._run(self._router.add(endpoint))

    def _on_down(self, replica: int, url: str) -> None:
        endpoint = self._endpoints.pop(url, None)
        if endpoint is not None and self._router is not None:
            self._loop.call_soon_threadsafe(self._router.remove, endpoint)

    def _on_hopeless(self) -> None:
        self.hopeless.set()
        if self._router is not None:
            self._run(self._router.balancer.give_up())

    def _run(self, work: Coroutine[Any, Any, T], deadline_s: float = _LOOP_S) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(deadline_s)


def serve(
    model: str | os.PathLike[str], config: ServeConfig | None = None, **settings: Any
) -> Server:
    """Start a server; use it as a context manager, or call `stop`.

    Args:
        model: Folder or hub name.
        config: All settings; or give some by name.
        settings: Fields of `ServeConfig`.
    """
    if config is not None and settings:
        raise ConfigError(
            "serve takes a config or settings by name, not both: got "
            f"{', '.join(sorted(settings))}"
        )
    config = config or ServeConfig.from_dict(settings, source="the arguments of serve")
    return Server(model, config).start()


def _router_class() -> type[Router]:
    try:
        from rl_models.serving.router import Router as RouterClass  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serving needs the package {error.name!r}; run: pip install {error.name}"
        ) from error
    return RouterClass


def _revealed(key: SecretStr | None) -> str | None:
    return None if key is None else key.get_secret_value()


def _dtype_of(folder: Path) -> DType:
    """Return the folder's dtype: vLLM's "auto" halves that of float32 models."""
    config = read_model_config(folder) or {}
    found = str(config.get("dtype") or config.get("torch_dtype")).split(".")[-1]
    return cast(DType, found) if found in get_args(DType) else "auto"


def _name_of(model: str, folder: Path | None) -> str:
    return model if folder is None else Path(model).resolve().name
