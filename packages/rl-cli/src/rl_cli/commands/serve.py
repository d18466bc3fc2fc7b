"""`rl serve`: serve a model with OpenAI's HTTP interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_cli.console import Terminal
from rl_cli.options import Whole

if TYPE_CHECKING:
    from rl_algorithms.trainers.run.signals import SignalGuard
    from rl_models.serving import Server

_LOOK_EVERY_S = 1.0


@click.command(short_help="Serve a model with OpenAI's HTTP interface.")
@click.argument("model", metavar="MODEL|RUN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--host", help="Address to listen on; default 127.0.0.1.")
@click.option("--port", type=Whole(0, 65_535),
              help="Port; default 8000, 0 for any free one.")  # fmt: skip
@click.option("--api-key", envvar="RL_API_KEY", metavar="KEY",
              help="Key that clients must send; set RL_API_KEY instead if others may "
              "see the arguments. Generated and printed if --host is not loopback.",
              )  # fmt: skip
@click.option("--weights-key", envvar="RL_WEIGHTS_KEY", metavar="KEY",
              help="Key of POST /rl/weights, distinct from the API key; set "
              "RL_WEIGHTS_KEY instead if others may see the arguments. Without a key "
              "the route is off.")  # fmt: skip
@click.option("--weights-root", metavar="FOLDER",
              help="Folder that must contain those weights.")  # fmt: skip
@click.option("--keys", "keys_file", metavar="FILE",
              help="Key file of rl keys create, for keys with roles.")  # fmt: skip
@click.option("--tls", is_flag=True, default=None,
              help="Encrypt, with a certificate that is created here.")  # fmt: skip
@click.option("--name", "model_name", help="Name of the model in requests.")
@click.option("--replicas", "num_replicas", type=Whole(most=1_000_000),
              help="Copies of the model that share the requests.")  # fmt: skip
@click.option("--max-model-len", type=Whole(),
              help="Maximum length of prompt plus answer, in tokens.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
              help="Data type of weights and cache; auto: the model's.")  # fmt: skip
@click.option("--engine", type=click.Choice(["auto", "vllm", "huggingface"]),
              help="Inference engine; auto: vllm if it is installed, else "
              "huggingface.")  # fmt: skip
@click.option("--tool-call-parser", metavar="NAME",
              help="Syntax of the model's tool calls, by vLLM's name (hermes, "
              "llama3_json, ...); enables tool calls.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True,
              help="Print one JSON object once the server is ready.")  # fmt: skip
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.pass_obj
def serve(
    obj: dict[str, bool],
    /,
    model: str,
    overrides: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> int:
    """Serve MODEL (a folder, a checkpoint, a run or a hub name) until Ctrl-C.

    The server implements OpenAI's HTTP interface: /v1/chat/completions, /v1/completions
    and /v1/models, with streaming, log-probs and token ids. With --weights-key and
    --weights-root, POST /rl/weights replaces the weights while it is serving. KEY=VALUE
    sets any field of ServeConfig. Ctrl-C waits for requests in progress, a second one
    does not. The folder of a run stands for the best checkpoint of its last stage, and
    gives the model its name.

    \b
    Examples:
      rl serve path/to/checkpoint
      rl serve runs/quickstart-001
      rl serve model --port 0 --json
      RL_API_KEY=secret rl serve model --host 0.0.0.0 --replicas 2
      rl serve model --host 0.0.0.0 --keys ~/.config/rl/keys.json --tls
      RL_WEIGHTS_KEY=other rl serve model --weights-root runs/a/checkpoints
      rl serve model request_deadline_s=60 vllm.max_num_seqs=64
    """
    from rl_algorithms.trainers.run.signals import (  # noqa: PLC0415
        Interrupted,
        SignalGuard,
    )

    terminal = Terminal(quiet=quiet)
    # Signals wait: an exception inside an import or the start of Ray leaves a mess.
    with SignalGuard() as guard:
        guard.hold()
        from rl_distributed.logs import configure_logging  # noqa: PLC0415

        configure_logging("debug" if obj["debug"] else "warning")
        server = _server(model, settings, overrides)
        from rl_distributed import shutdown_ray  # noqa: PLC0415

        try:
            return _run(server, guard, terminal, as_json)
        except Interrupted as error:
            terminal.note("stopped before the server was ready")
            return error.exit_code
        finally:
            guard.close()
            # After an error, requests in progress are not waited for.
            server.stop(0.0)
            shutdown_ray()


def _server(model: str, settings: dict[str, Any], overrides: tuple[str, ...]) -> Server:
    from rl_cli.trained_model import is_run, weights_of_run  # noqa: PLC0415
    from rl_distributed.config import (  # noqa: PLC0415
        apply_overrides,
        merge_configs,
        parse_overrides,
    )
    from rl_models.checkpoint.hub import check_model  # noqa: PLC0415
    from rl_models.serving import ServeConfig  # noqa: PLC0415
    from rl_models.serving.weights_root import within_checkpoint  # noqa: PLC0415

    given = {name: value for name, value in settings.items() if value is not None}
    changes = apply_overrides({}, parse_overrides(overrides), schema=ServeConfig)
    both = sorted(given.keys() & changes.keys())
    if both:
        raise click.UsageError(f"{both[0]} is given twice, as an option and as a key.")
    document = merge_configs(given, changes)
    if is_run(model):
        document.setdefault("model_name", Path(model).expanduser().resolve().name)
        model = weights_of_run(model)
    config = ServeConfig.from_dict(document, source="the command line")
    check_model(within_checkpoint(model))
    # Imported last, which takes seconds: mistakes are reported at once.
    from rl_models.serving import Server  # noqa: PLC0415

    return Server(model, config)


def _run(server: Server, guard: SignalGuard, terminal: Terminal, as_json: bool) -> int:
    import os  # noqa: PLC0415

    from rl_algorithms.trainers.run.signals import Interrupted  # noqa: PLC0415
    from rl_cli.engine_environment import prepare_engine  # noqa: PLC0415
    from rl_distributed import init_ray  # noqa: PLC0415
    from rl_models.serving.config import ENGINE  # noqa: PLC0415

    # Before the model is loaded, so that a port in use is reported at once.
    server.bind()
    count = server.config.num_replicas
    terminal.note(
        f"starting {count} replica{'s' if count > 1 else ''} of {server.model}"
    )
    local = os.environ.get("RAY_ADDRESS", "local") == "local"
    # At least one CPU per replica, or Ray would not start them all on a small machine.
    init_ray(max(os.cpu_count() or 1, count) if local else None)
    # Ray's start may have replaced the handlers.
    guard.install()
    guard.release()
    if server.config.engine == "vllm":
        prepare_engine(ENGINE, terminal)
    server.start()
    _tell(server, terminal, as_json)
    try:
        while not server.hopeless.wait(_LOOK_EVERY_S):
            pass
    except Interrupted as error:
        guard.acknowledge()
        terminal.note(
            f"stopping; requests in progress have {server.config.drain_deadline_s:g} s "
            "to finish (a second Ctrl-C cancels them)"
        )
        return 0 if server.stop() else error.exit_code
    terminal.note("no replica is left; see the reason above")
    return 1


def _tell(server: Server, terminal: Terminal, as_json: bool) -> None:
    """Print the address; programs that read JSON wait for this line."""
    ready = {"url": server.url, "model": server.model_name}
    if server.has_generated_key:
        ready["api_key"] = str(server.api_key)
    if as_json:
        terminal.raw(json.dumps(ready))
        return
    terminal.raw(f"{server.model_name} is served at {server.url}/v1")
    if server.has_generated_key:
        terminal.raw(f"API key: {server.api_key}")
