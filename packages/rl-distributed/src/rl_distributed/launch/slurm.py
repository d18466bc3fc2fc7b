"""A batch script for Slurm that brings up a Ray cluster and runs a program on it.

```
sbatch script, first node          other nodes
  token, certificates, ports
  srun ray start --head   <------  srun ray start --address
  wait until all nodes are there (deadline)
  srun the program, RAY_ADDRESS set
  end of any of the three: end the others, remove token and certificates
```
"""

from __future__ import annotations

import re
import shlex
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rl_distributed.cluster.topology import NVLINK_DOMAIN_LABEL
from rl_distributed.config import Config

__all__ = ["SlurmConfig", "SlurmContainer", "slurm_script"]

_TIME = re.compile(r"(\d+-)?\d+(:\d{2}){0,2}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Ports of one job: its Ray processes, then one for each worker process.
_FIXED_PORTS = 16
# Below them lie ports of the system, above them those that PortAllocator gives out.
_FIRST_PORT, _END_PORT = 11_000, 20_000


class SlurmContainer(Config):
    """A container image that everything of the job runs in."""

    image: str
    """Image: a path of a file, or a name that the tool knows."""
    tool: Literal["pyxis", "apptainer"] = "pyxis"
    """`pyxis`: options of srun; `apptainer`: `apptainer exec`."""
    mounts: list[str] = Field(default_factory=list)
    """Folders to mount, each `outside:inside`."""


class SlurmConfig(Config):
    """One Slurm job with a Ray cluster over all its nodes."""

    command: list[str]
    """The program and its arguments; it finds the cluster in `RAY_ADDRESS`."""
    job_name: str = "rl"
    """Name of the job."""
    num_nodes: int = Field(default=1, ge=1)
    """Nodes; the head of the Ray cluster is on the first."""
    cpus_per_node: int = Field(default=8, ge=1)
    """CPUs on each node."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs on each node."""
    memory_gb_per_node: int | None = Field(default=None, ge=1)
    """Memory of each node in GiB; None: what the partition gives."""
    time_limit: str = "01:00:00"
    """How long the job may take, in Slurm's form: `[days-]hours:minutes:seconds`."""
    partition: str | None = None
    """Partition; None: the default one."""
    account: str | None = None
    """Account to charge; None: the default one."""
    exclusive: bool = True
    """Whether the nodes run no other jobs at the same time."""
    output: str = "slurm-%j.out"
    """File of the job's output; `%j` is its number."""
    directives: dict[str, str] = Field(default_factory=dict)
    """Further `#SBATCH` options: `{"qos": "high"}` is `--qos=high`; an empty value
    leaves the `=` out."""
    python: str = "python"
    """Python of the nodes or of the container, with Ray and rl-distributed."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines that come first, such as `module load` or the activation of an
    environment."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of everything that runs. No secrets: the script is a
    file; have the program read them from where they are kept."""
    state_dir: str = "${SLURM_SUBMIT_DIR:-$PWD}"
    """Folder that all nodes see, for the token and the certificates of the job."""
    ports_per_job: int = Field(default=300, ge=50, le=4_000)
    """Ports that are set aside for the job on each node: a worker process takes one.
    Jobs that share a node get different ones, by their numbers."""
    start_deadline_s: int = Field(default=300, ge=10)
    """How long all nodes together may take to join."""
    warn_before_s: int = Field(default=120, ge=0)
    """Seconds before the time limit at which the program gets SIGUSR1; 0: never."""
    tls: bool = False
    """Whether Ray's processes encrypt what they send to each other."""
    container: SlurmContainer | None = None
    """Container that everything runs in; None: the nodes themselves."""
    address_command: str = "hostname -I | cut -d' ' -f1"
    """Shell command that prints the address by which a node is reached by others."""
    nvlink_domain_command: str = ""
    """Shell command that prints the NVLink domain of a node, for the order of ranks;
    empty: nodes have none in common."""

    @field_validator("command")
    @classmethod
    def _has_a_program(cls, value: list[str]) -> list[str]:
        if not value or not value[0].strip():
            raise ValueError("must name a program, such as ['python', 'train.py']")
        return value

    @field_validator("time_limit")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        if not _TIME.fullmatch(value):
            raise ValueError(
                "must be minutes, hours:minutes:seconds or days-hours:minutes:seconds: "
                f"got {value!r}"
            )
        return value

    @field_validator("env_vars")
    @classmethod
    def _are_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an environment variable")
        return value

    @model_validator(mode="after")
    def _fits_on_lines(self) -> SlurmConfig:
        texts = {
            "job_name": self.job_name,
            "partition": self.partition or "",
            "account": self.account or "",
            "output": self.output,
            **{f"directives.{k}": f"{k}{v}" for k, v in self.directives.items()},
        }
        own = {
            "nodes": "num_nodes",
            "cpus-per-task": "cpus_per_node",
            "gpus-per-node": "gpus_per_node",
            "ntasks-per-node": "",
        }
        for name, setting in own.items():
            # The script starts Ray by its own numbers.
            if name in self.directives:
                remedy = f"set {setting}" if setting else "it is 1"
                raise ValueError(
                    f"directives.{name} must be left out: {remedy}; got "
                    f"{self.directives[name]!r}"
                )
        for name, text in texts.items():
            # A line break would end the directive and begin a line of shell.
            if re.search(r"[\n\r]", text):
                raise ValueError(f"{name} must be on one line: got {text!r}")
        return self


def slurm_script(config: SlurmConfig) -> str:
    """Return the batch script of a job, to be written to a file and given to `sbatch`.

    The same configuration gives the same text. It holds no secret: the token is made
    when the job runs, in a file that its owner can read.
    """
    parts = [
        _directives(config),
        _PROLOGUE,
        # Files of shells and activations of environments read variables that are not
        # set.
        "\n".join(["set +u", *config.setup, "set -u"]) if config.setup else "",
        _settings(config),
        _NODES_AND_TOKEN.replace("@address@", shlex.quote(config.address_command)),
        _certificates(config),
        _start(config),
        _RUN.replace("@program@", _in_container(config, shlex.join(config.command))),
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def _directives(config: SlurmConfig) -> str:
    options: dict[str, str | int | None] = {
        "job-name": config.job_name,
        "nodes": config.num_nodes,
        # One task per node, which becomes one Ray node.
        "ntasks-per-node": 1,
        "cpus-per-task": config.cpus_per_node,
        "gpus-per-node": config.gpus_per_node or None,
        "mem": f"{config.memory_gb_per_node}G" if config.memory_gb_per_node else None,
        "time": config.time_limit,
        "partition": config.partition,
        "account": config.account,
        # Empty: the option takes no value.
        "exclusive": "" if config.exclusive else None,
        "output": config.output,
        # B: only the script gets the signal and passes it on; it would
        # kill Ray's processes.
        "signal": f"B:USR1@{config.warn_before_s}" if config.warn_before_s else None,
        **config.directives,
    }
    lines = [
        f"#SBATCH --{name}={value}" if value != "" else f"#SBATCH --{name}"
        for name, value in options.items()
        if value is not None
    ]
    return "\n".join(["#!/bin/bash", *lines])


_PROLOGUE = """
set -euo pipefail
umask 077
"""


def _settings(config: SlurmConfig) -> str:
    lines = [
        # Since Slurm 22.05 srun does not take over --cpus-per-task of the job, and
        # would give its steps one core each.
        f'export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-{config.cpus_per_node}}}"',
        *(
            f"export {name}={shlex.quote(value)}"
            for name, value in config.env_vars.items()
        ),
    ]
    # Consecutive jobs may share a node, so they get different blocks of ports.
    blocks = max(1, (_END_PORT - _FIRST_PORT) // config.ports_per_job)
    lines += [
        f'state="{config.state_dir}/.rl-ray-${{SLURM_JOB_ID}}"',
        f"num_nodes={config.num_nodes}",
        f"start_deadline_s={config.start_deadline_s}",
        f"port=$(({_FIRST_PORT} + SLURM_JOB_ID % {blocks} * {config.ports_per_job}))",
        f"ray_ports=(--node-manager-port=$((port + 1)) "
        f"--object-manager-port=$((port + 2)) --metrics-export-port=$((port + 3)) "
        f"--dashboard-agent-listen-port=$((port + 4)) "
        f"--dashboard-agent-grpc-port=$((port + 5)) "
        f"--runtime-env-agent-port=$((port + 6)) "
        f"--min-worker-port=$((port + {_FIXED_PORTS})) "
        f"--max-worker-port=$((port + {config.ports_per_job - 1})))",
        f"resources=(--num-cpus={config.cpus_per_node} "
        f"--num-gpus={config.gpus_per_node})",
    ]
    return "\n".join(lines)


_NODES_AND_TOKEN = r"""
mkdir -p "$state"
pids=()
program=""
ray_ended=0
signalled=0
end_all() {
  trap - EXIT TERM INT USR1 USR2
  if ((${#pids[@]})); then
    kill "${pids[@]}" 2>/dev/null || true
    wait "${pids[@]}" 2>/dev/null || true
  fi
  rm -rf "$state"
}
trap end_all EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
# A warning before the time limit: the program may save what it has.
trap 'signalled=1; [[ -z "$program" ]] || kill -USR1 "$program" 2>/dev/null' USR1
trap 'signalled=1; ray_ended=1' USR2

# Runs a part of Ray, and tells this script when it ends.
part_of_ray() {
  "$@" &
  local child=$!
  trap 'kill "$child" 2>/dev/null; wait "$child"; exit' TERM
  wait "$child" || true
  kill -USR2 $$
}

# Only a path stands in the environment; the token itself is in a file.
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$state/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$state/token"
export RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${nodes[0]}"
on_head=(srun --overlap --nodes=1 --ntasks=1 -w "$head")
address_of() { srun --overlap --nodes=1 --ntasks=1 -w "$1" bash -c @address@; }
head_address="$(address_of "$head")"
"""


def _in_container(config: SlurmConfig, command: str) -> str:
    """`command`, to stand behind srun's options."""
    container = config.container
    if container is None:
        return command
    image = shlex.quote(container.image)
    # The folder with the token is known only when the job runs.
    mounts = ['"$state:$state"', *map(shlex.quote, container.mounts)]
    if container.tool == "pyxis":
        joined = ",".join(mounts)
        return f"--container-image={image} --container-mounts={joined} {command}"
    binds = " ".join(f"--bind {mount}" for mount in mounts)
    gpus = " --nv" if config.gpus_per_node else ""
    return f"apptainer exec{gpus} {binds} {image} {command}"


def _python(config: SlurmConfig, code: str) -> str:
    return _in_container(config, f"{config.python} -c {shlex.quote(code)}")


def _certificates(config: SlurmConfig) -> str:
    if not config.tls:
        return ""
    make = _python(
        config,
        "import sys; from rl_distributed.security import create_certificates; "
        "create_certificates(sys.argv[1], hosts=sys.argv[2:])",
    )
    return f"""
# One certificate for all nodes, by an authority whose key nobody keeps.
hosts=("${{nodes[@]}}")
for node in "${{nodes[@]}}"; do hosts+=("$(address_of "$node")"); done
"${{on_head[@]}}" {make} "$state/tls" "${{hosts[@]}}"
export RAY_USE_TLS=1 RAY_TLS_SERVER_CERT="$state/tls/node.crt"
export RAY_TLS_SERVER_KEY="$state/tls/node.key" RAY_TLS_CA_CERT="$state/tls/ca.crt"
"""


def _start(config: SlurmConfig) -> str:
    # The address and the domain are asked on each node, not where the script runs.
    start = f'exec ray start --block --node-ip-address="$({config.address_command})"'
    if config.nvlink_domain_command:
        start += f' --labels "{NVLINK_DOMAIN_LABEL}=$({config.nvlink_domain_command})"'
    start += ' "$@"'
    ray = _in_container(config, f"bash -c {shlex.quote(start)} start-ray")
    script = f"""
part_of_ray "${{on_head[@]}}" {ray} \\
  --head --include-dashboard=false --port="$port" \\
  --ray-client-server-port=$((port + 7)) \\
  "${{ray_ports[@]}}" "${{resources[@]}}" &
pids+=($!)
"""
    if config.num_nodes > 1:
        script += f"""
part_of_ray srun --overlap --nodes=$((num_nodes - 1)) --ntasks=$((num_nodes - 1)) \\
  --ntasks-per-node=1 --exclude="$head" {ray} \\
  --address="$head_address:$port" "${{ray_ports[@]}}" "${{resources[@]}}" &
pids+=($!)
"""
    wait = _python(
        config,
        "import sys; from rl_distributed.cluster.start import wait_for_nodes; "
        "wait_for_nodes(int(sys.argv[1]), deadline_s=float(sys.argv[2]))",
    )
    return f"""{script}
export RAY_ADDRESS="$head_address:$port"
"${{on_head[@]}}" {wait} "$num_nodes" "$start_deadline_s"
"""


_RUN = r"""
"${on_head[@]}" @program@ &
program=$!
pids+=("$program")
while true; do
  signalled=0
  code=0
  wait "$program" || code=$?
  # A signal ends the wait, too, with the program still there.
  ((signalled)) || break
  if ((ray_ended)); then
    echo "a part of Ray ended before the program; its own output says why" >&2
    exit 1
  fi
done
exit "$code"
"""
