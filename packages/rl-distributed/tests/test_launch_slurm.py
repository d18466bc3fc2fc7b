from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rl_distributed_scripts import (
    clean_environment,
    end_session,
    ray_folder,
    run_to_end,
)

from rl_distributed.cluster.ports import find_free_ports
from rl_distributed.errors import ConfigError, ResourceInsufficientError
from rl_distributed.launch import SlurmConfig, SlurmContainer, slurm_script

LARGE = SlurmConfig(
    command=["python", "train.py", "--name", "two words; $HOME"],
    job_name="my job",
    num_nodes=4,
    cpus_per_node=64,
    gpus_per_node=8,
    memory_gb_per_node=900,
    time_limit="2-00:00:00",
    partition="gpu",
    account="team",
    directives={"qos": "high", "requeue": ""},
    setup=["module load cuda"],
    env_vars={"TITLE": "it's $1"},
    tls=True,
    container=SlurmContainer(image="my image.sqsh", mounts=["/data:/data"]),
    nvlink_domain_command="cat /etc/rack",
)
VARIANTS = {
    "small": SlurmConfig(command=["true"]),
    "large": LARGE,
    "tls": SlurmConfig(command=["true"], num_nodes=2, tls=True),
    "apptainer": LARGE.replace(
        container=SlurmContainer(image="a.sif", tool="apptainer", mounts=["/a:/b"])
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_scripts_are_bash(name):
    script = slurm_script(VARIANTS[name])
    done = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert script == slurm_script(VARIANTS[name])
    assert max(map(len, script.splitlines())) < 600


def directives(script):
    """Return the `#SBATCH` options; Slurm reads them up to the first command."""
    head, _, rest = script.partition("\nset -euo pipefail\n")
    assert head.startswith("#!/bin/bash\n")
    assert "#SBATCH" not in rest
    found = {}
    for line in head.splitlines()[1:]:
        if not line:
            continue
        match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.+))?", line)
        assert match, line
        found[match[1]] = match[2]
    return found


def test_directives():
    assert directives(slurm_script(LARGE)) == {
        "job-name": "my job",
        "nodes": "4",
        "ntasks-per-node": "1",
        "cpus-per-task": "64",
        "gpus-per-node": "8",
        "mem": "900G",
        "time": "2-00:00:00",
        "partition": "gpu",
        "account": "team",
        "exclusive": None,
        "output": "slurm-%j.out",
        "signal": "B:USR1@120",
        "qos": "high",
        "requeue": None,
    }
    small = directives(slurm_script(SlurmConfig(command=["x"], warn_before_s=0)))
    assert not {"gpus-per-node", "mem", "partition", "signal"} & set(small)


def test_the_parts_of_ray():
    script = slurm_script(LARGE)
    words = shlex.split(script, comments=True)
    assert words.count("part_of_ray") == 2
    assert "--head" in words
    assert "--container-image=my image.sqsh" in words
    assert "--exclude=$head" in words
    assert '--labels "rl/nvlink-domain=$(cat /etc/rack)"' in script
    assert "TITLE=it's $1" in words
    assert script.index("module load cuda") < script.index("scontrol")
    assert "RAY_AUTH_MODE=token" in words
    assert "create_certificates" in script
    assert "create_certificates" not in slurm_script(VARIANTS["small"])
    one_node = shlex.split(slurm_script(VARIANTS["small"]), comments=True)
    assert one_node.count("part_of_ray") == 1
    assert "apptainer exec --nv --bind" in slurm_script(VARIANTS["apptainer"])


def test_ports_of_jobs_do_not_meet():
    config = SlurmConfig(command=["x"], ports_per_job=300)
    (line,) = [x for x in slurm_script(config).splitlines() if x.startswith("port=")]
    ports = []
    for job in range(100, 130):
        done = subprocess.run(
            ["bash", "-c", f"SLURM_JOB_ID={job}; {line}; echo $port"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        ports.append(int(done.stdout))
    ports.sort()
    assert ports[0] >= 11_000
    assert ports[-1] + 300 <= 20_000
    assert all(b - a >= 300 for a, b in itertools.pairwise(ports))


@pytest.mark.parametrize("time_limit", ["90", "120:30", "168:00:00", "7-00:00:00"])
def test_time_limits_of_slurm(time_limit):
    config = SlurmConfig(command=["x"], time_limit=time_limit)
    assert directives(slurm_script(config))["time"] == time_limit


def test_steps_have_all_cores_of_their_node():
    script = slurm_script(SlurmConfig(command=["x"], cpus_per_node=12))
    line = 'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-12}"'
    assert script.index(line) < script.index("srun ")


def test_setup_may_read_variables_that_are_not_set(tmp_path):
    setup = ['[ -z "$BASHRCSOURCED" ] && ready=yes']
    script = slurm_script(SlurmConfig(command=["x"], setup=setup))
    before, _, after = script.partition(setup[0])
    body = before + setup[0] + after.partition("\nexport")[0]
    done = subprocess.run(
        ["bash", "-c", f"{body}\necho $ready; echo $missing"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    # Only the setup itself may.
    assert done.stdout == "yes\n"
    assert "missing: unbound variable" in done.stderr


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"command": []}, "must name a program"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"time_limit": "soon"}, "must be minutes"),
        ({"directives": {"nodes": "4"}}, "directives.nodes must be left out: set num_"),
        ({"directives": {"ntasks-per-node": "2"}}, "must be left out: it is 1"),
        ({"job_name": "a\nrm -rf /"}, "job_name must be on one line"),
        ({"directives": {"qos": "a\nb"}}, "directives.qos must be on one line"),
        ({"env_vars": {"a b": "c"}}, "no name of an environment variable"),
        ({"partion": "gpu"}, "partition"),
    ],
)
def test_wrong_settings(values, words):
    with pytest.raises(ConfigError, match=words):
        SlurmConfig(**{"command": ["x"], **values})


# --- the script run where `srun` runs its command here ------------------------------

SRUN = """#!/bin/bash
while [[ "${1:-}" == -* ]]; do
  [[ "$1" == -w ]] && shift
  shift
done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo first-node
"""


def free_job():
    """Return a job number whose ports are unused on this machine."""
    for job in range(os.getpid(), os.getpid() + 30):
        low = 11_000 + job % 30 * 300
        with contextlib.suppress(ResourceInsufficientError):
            find_free_ports(16, low, low + 16)
            return job
    raise AssertionError("all ports between 11000 and 20000 are in use")


@pytest.fixture
def slurm(tmp_path):
    """Return a job's variables, with stand-ins for Slurm's programs on the path."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    here = Path(sys.executable).parent
    with ray_folder() as folder:
        yield clean_environment(
            PATH=os.pathsep.join([str(programs), str(here), os.environ["PATH"]]),
            RAY_TMPDIR=folder,
            SLURM_JOB_ID=str(free_job()),
            SLURM_JOB_NODELIST="first-node",
            SLURM_SUBMIT_DIR=str(tmp_path),
        )


def written(tmp_path, script):
    file = tmp_path / "job.sh"
    file.write_text(script)
    return ["bash", str(file)]


PROGRAM = """
import json, os
from rl_distributed import init_ray
import ray
started = init_ray(deadline_s=60)
token = os.environ["RAY_AUTH_TOKEN_PATH"]
print(json.dumps([started, ray.cluster_resources()["CPU"], token,
    oct(os.stat(token).st_mode & 0o777), os.environ["RAY_AUTH_MODE"],
    os.environ.get("RAY_USE_TLS"), os.environ["TITLE"]]))
raise SystemExit(7)
"""


@pytest.mark.slow
def test_a_job_on_one_node_runs_its_program(tmp_path, slurm):
    config = SlurmConfig(
        command=[sys.executable, "-c", PROGRAM],
        python=sys.executable,
        cpus_per_node=1,
        env_vars={"TITLE": "it's $1"},
        tls=True,
    )
    code, out, err = run_to_end(written(tmp_path, slurm_script(config)), slurm, 200)
    assert code == 7, err
    (line,) = [x for x in out.splitlines() if x.startswith("[")]
    state = f"{tmp_path}/.rl-ray-{slurm['SLURM_JOB_ID']}"
    expected = [False, 1.0, f"{state}/token", "0o600", "token", "1", "it's $1"]
    assert json.loads(line) == expected
    # Token and certificates are removed with the job.
    assert not Path(state).exists()


def fake_ray(tmp_path, slurm, script):
    """A job whose Ray is a shell script, to test what happens around it."""
    program = tmp_path / "bin" / "ray"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    # The wait for the nodes is a program too.
    python = tmp_path / "bin" / "fake-python"
    python.write_text("#!/bin/bash\nexit 0\n")
    python.chmod(0o755)
    return {"python": "fake-python"}


def test_a_part_of_ray_that_ends_ends_the_job(tmp_path, slurm):
    fakes = fake_ray(
        tmp_path,
        slurm,
        f"while [[ ! -e {tmp_path}/up ]]; do read -t 0.05 <> <(:); done",
    )
    command = ["bash", "-c", f"touch {tmp_path}/up; exec tail -f /dev/null"]
    config = SlurmConfig(command=command, **fakes)
    code, _, err = run_to_end(written(tmp_path, slurm_script(config)), slurm, 100)
    assert code == 1
    assert "a part of Ray ended before the program" in err


def test_the_warning_reaches_the_program(tmp_path, slurm):
    fakes = fake_ray(tmp_path, slurm, "exec tail -f /dev/null")
    waits = (
        f"trap 'echo saved; exit 5' USR1; touch {tmp_path}/up; "
        "while true; do read -t 0.05 <> <(:); done"
    )
    config = SlurmConfig(command=["bash", "-c", waits], **fakes)
    process = subprocess.Popen(
        written(tmp_path, slurm_script(config)),
        env=slurm,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_file(tmp_path / "up")
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=100)
    finally:
        end_session(process)
        with contextlib.suppress(ValueError):
            process.communicate(timeout=30)
    assert (process.returncode, out) == (5, "saved\n"), err


def wait_for_file(path):
    pause = threading.Event()
    for _ in range(6_000):
        if path.exists():
            return
        pause.wait(0.01)
    raise AssertionError(f"{path} did not appear")
