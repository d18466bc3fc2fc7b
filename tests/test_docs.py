"""README and docs are correct: programs, commands, keys, metrics and links.

Programs that need neither Ray nor a model are run. In the others, every import from our
packages must exist, and a slow test executes the two complete training runs.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from docs.hooks_pages import RUN_OF_THE_PAGE
from docs.hooks_terminal import MARKER as TERMINAL, RECORDINGS, file_name
from processes import kill_session

from rl_algorithms import GRPOConfig, algorithm_names, get_algorithm
from rl_algorithms.compat.nemo_rl.name_map import read_name_map
from rl_algorithms.presets import find_preset
from rl_cli.main import cli
from rl_cli.run_config import RecipeConfig, load_run, recipe_names
from rl_distributed.config import load_config
from rl_distributed.config.schema import SchemaNode, UnknownKey
from rl_models import ModelBuildConfig, build_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PACKAGES = ("rl_distributed", "rl_models", "rl_envs", "rl_algorithms", "rl_cli")
# These train, or join a remote cluster; the others start local processes.
NOT_HERE = re.compile(
    r"rl\.train|trainer\.fit|from_pretrained|address=|path/or/hub-name|path/to/model"
)
HEAVY = re.compile(rf"init_ray|{NOT_HERE.pattern}")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


def on_pages(find: Callable[[Path], list[str]]) -> list[Any]:
    """Return every finding as a parameter, named by its page."""
    return [
        pytest.param(found, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, found in enumerate(find(page))
    ]


PROGRAMS = on_pages(lambda page: ["\n".join(blocks(page, "python"))])


def public(module: Any) -> list[str]:
    """Return a module's public names; its package's tests prove that they exist."""
    return list(module.__all__)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.values[0]])
def test_imports_of_programs_exist(program: str) -> None:
    names = {"rl": "rl_algorithms"}
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in PACKAGES:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert alias.name in public(module), node.module
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
        ):
            module = importlib.import_module(names[node.value.id])
            assert node.attr in public(module)


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.values[0] and not HEAVY.search(p.values[0])]
)
def test_light_programs_run(program: str) -> None:
    code = compile(program, "page", "exec", dont_inherit=True)
    exec(code, {"__name__": "page"})


ONE_AFTER_THE_OTHER = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    print(*words, file=sys.stderr, flush=True)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
"""


def run(folder: Path, *programs: list[str]) -> str:
    """Run Python programs in a folder; return their output.

    All in one process, so torch starts once; the last program named is at fault.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(programs)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=280)
    finally:
        kill_session(process)
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
def test_programs_with_workers_run(tmp_path: Path) -> None:
    files = []
    for page in PROGRAMS:
        (program,) = page.values
        if "init_ray(" in program and not NOT_HERE.search(program):
            files.append(tmp_path / f"{str(page.id).replace('/', '-')}.py")
            files[-1].write_text(program)
    assert len(files) >= 3
    run(tmp_path, *([str(file)] for file in files))


def test_reward_page_runs_but_for_its_training() -> None:
    program = "\n".join(blocks(ROOT / "docs/tutorials/reward.md", "python"))
    exec(compile(program, "reward.md", "exec"), {"__name__": "page"})


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("text-games", 3),
        ("arithmetic", 2),
        ("json-schema", 1),
        ("regex", 1),
        ("format", 1),
        ("length", 1),
        ("multi-reward", 1),
        ("retrieval", 1),
        ("gymnasium", 1),
        ("textarena", 1),
        # It starts two servers of OpenEnv's package.
        pytest.param("openenv", 1, marks=pytest.mark.slow),
        ("reward-hacking", 1),
    ],
)
def test_dialogues_of_worlds_are_what_their_programs_print(
    name: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / f"docs/guides/{name}.md"
    names: dict[str, Any] = {"__name__": "page"}
    programs = blocks(page, "python")
    shown = blocks(page, "text")
    assert len(programs) == len(shown) == number
    for program, text in zip(programs, shown, strict=True):
        exec(compile(program, page.name, "exec"), names)
        assert capsys.readouterr().out == text


PLACEHOLDERS = ("RECIPE|ALGORITHM", "NAME", "focal")  # focal: the tutorial writes it


def rl_commands(page: Path) -> list[str]:
    """Return command lines that begin with `rl`, in blocks and in running text."""
    text = page.read_text()
    fenced = "\n".join(blocks(page, "sh") + blocks(page, "text"))
    lines = fenced.replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in line.split("&&")]
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    parts += re.findall(r"`([^`]+)`", outside)
    parts += [match[3] for match in TERMINAL.finditer(text)]
    found = [part.strip().removeprefix("$ ").split(" > ")[0] for part in parts]
    return [part for part in dict.fromkeys(found) if re.match(r"rl [a-z]", part)]


@pytest.mark.parametrize("line", on_pages(rl_commands))
def test_commands_parse_and_their_keys_exist(line: str) -> None:
    command: click.Command = cli
    context = click.Context(cli, info_name="rl")
    arguments = shlex.split(line, comments=True)[1:]
    while isinstance(command, click.Group) and arguments:
        found = command.get_command(context, arguments[0])
        assert found is not None, f"no command {arguments[0]!r}"
        name, arguments = arguments[0], arguments[1:]
        command, context = found, click.Context(found, info_name=name, parent=context)
    if not arguments:
        return
    parsed = command.make_context(context.info_name, arguments, parent=context.parent)
    name = parsed.params.get("name", parsed.params.get("algorithm"))
    if name is None or name.endswith(".yaml") or name in PLACEHOLDERS:
        return
    # Also a file type, for which `rl config schema` builds the schema.
    if line.startswith("rl config schema ") and name == "recipe":
        return
    algorithm = name in algorithm_names() or find_preset(name) is not None
    assert algorithm or name in recipe_names()
    overrides = parsed.params.get("overrides") or ()
    wrong = "num_promts_per_step" in line  # shown for its message
    if not overrides or wrong:
        return
    placeholders = [o.replace("=...", "=1") for o in overrides]
    if algorithm:
        placeholders.append("++policy.model_name=model")
    load_run(name, None, placeholders)


CONFIGS = [get_algorithm(name).config_class for name in algorithm_names()]
SECTIONS = {name for config in CONFIGS for name in config.model_fields}
KEY = re.compile(
    # A name that ends in .yaml is a run file.
    rf"`((?:{'|'.join(sorted(SECTIONS))}|common|stages)(?:\.(?!yaml`)\w+)+)(?:=[^`]*)?`"
)


@pytest.mark.parametrize("key", on_pages(lambda page: KEY.findall(page.read_text())))
def test_keys_exist(key: str) -> None:
    path = tuple(key.split("."))
    nodes = [SchemaNode.of(cls) for cls in (*CONFIGS, RecipeConfig)]
    assert any(not isinstance(node.find(path), UnknownKey) for node in nodes), key


def test_configuration_page_shows_a_valid_file(tmp_path: Path) -> None:
    shown, *_ = blocks(ROOT / "docs/get-started/configuration.md", "yaml")
    (tmp_path / "my.yaml").write_text(shown)
    (tmp_path / "base.yaml").write_text("policy: {max_total_sequence_length: 1024}\n")
    data = load_config(tmp_path / "my.yaml")
    config = GRPOConfig.from_dict(data, source="my.yaml")
    assert config.logger.log_dir == "runs/mine/logs"


def test_shown_error_is_the_real_one() -> None:
    page = (ROOT / "docs/get-started/configuration.md").read_text()
    shown = re.search(r"^Error: (.*)$", page, re.M)
    assert shown is not None
    overrides = ["policy.model_name=m", "grpo.num_promts_per_step=8"]
    with pytest.raises(Exception, match="did you mean") as caught:
        load_run("grpo", None, overrides)
    assert str(caught.value) == shown[1]


METRIC = re.compile(r"`(?:train|val):([\w/]+)`")


def test_metrics_of_the_algorithm_pages_are_made_somewhere() -> None:
    source = "\n".join(
        path.read_text()
        for package in ("rl-algorithms", "rl-models", "rl-envs")
        for path in (ROOT / "packages" / package / "src").rglob("*.py")
    )
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for name in sorted(set(METRIC.findall(text))):
        last = name.removeprefix("env/")
        made = {f'"{last}"', f'"{last.removeprefix("critic/")}"'}
        assert any(one in source for one in made), f"nothing makes the metric {name!r}"


def links(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text())
    return [f"{page.parent}|{link}" for link in found if "://" not in link]


@pytest.mark.parametrize("link", on_pages(links))
def test_links_lead_to_files(link: str) -> None:
    folder, _, target = link.partition("|")
    assert (Path(folder) / target).exists()


def test_markers_name_what_is_there() -> None:
    marker = re.compile(r"^\{\{ (config|command|file): (.+?) \}\}$", re.M)
    for page in PAGES:
        text = page.read_text()
        num_markers = len(marker.findall(text)) + len(TERMINAL.findall(text))
        assert text.count("{{") == num_markers, page
        for kind, name in marker.findall(text):
            if kind == "file":
                assert (ROOT / name).is_file()


def commands_of(group: click.Group) -> Iterator[list[str]]:
    """Return the words of each command."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from ([name, *words] for words in commands_of(command))
        else:
            yield [name]


def test_every_command_has_a_picture() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    shown = [(match[1], match[3]) for match in TERMINAL.finditer(page)]
    words = [shlex.split(command)[1:] for _, command in shown]
    for command in commands_of(cli):
        assert command in [line[: len(command)] for line in words], command
    recorded = {
        f"{file_name(command)}.txt" for kind, command in shown if kind == "recorded"
    }
    # Each is shown, and each shown one exists.
    kept = {path.name for path in RECORDINGS.glob("*.txt")}
    assert kept == recorded


def recorded_texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every recording."""
    for path in sorted(RECORDINGS.rglob("*.*")):
        if path != RUN_OF_THE_PAGE:
            yield path.name, path.read_text()
    with tarfile.open(RUN_OF_THE_PAGE) as packed:
        for member in packed.getmembers():
            assert (member.uid, member.gid, member.uname) == (0, 0, "")
            if (file := packed.extractfile(member)) is not None:
                yield member.name, file.read().decode()


def test_recordings_name_no_machine() -> None:
    texts = list(recorded_texts())
    assert len(texts) > 30
    for name, text in texts:
        assert re.findall(r"(?:/home|/root|/tmp|/work)\b[^\s\"]*", text) == [], name
        assert not re.search(r"Linux-\d", text), name


def message_fragments() -> list[str]:
    page = ROOT / "docs/guides/troubleshooting.md"
    messages = re.findall(r"^\| `(.*?)` \|", page.read_text(), re.M)
    assert len(messages) >= 15
    return [part.strip() for one in messages for part in one.split("...")]


@pytest.mark.parametrize("fragment", [one for one in message_fragments() if one])
def test_messages_of_the_troubleshooting_page_are_real(fragment: str) -> None:
    # Multi-line literals are one message; parts in braces vary.
    texts = []
    for path in (ROOT / "packages").glob("*/src/**/*.py"):
        source = re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        texts.append(re.sub(r"\{[^{}]*\}", "", source))
    assert any(fragment in text for text in texts)


def test_the_page_of_names_of_nemo_rl_is_the_map() -> None:
    page = (ROOT / "docs/reference/nemo-rl-names.md").read_text()
    assert page.endswith(f"\n\n{read_name_map().to_markdown()}")


def test_every_page_is_in_the_navigation() -> None:
    # The file has no tags of its own, so the safe loader reads it.
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = set(re.findall(r"[\w/-]+\.md", str(nav)))
    docs = ROOT / "docs"
    assert listed == {str(path.relative_to(docs)) for path in docs.rglob("*.md")}


def test_readme_keeps_its_promises_of_length() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    program, *_ = blocks(ROOT / "README.md", "python")
    code = [line for line in program.splitlines() if line.strip()]
    assert len(code) <= 20


def test_home_page_shows_a_run_at_once() -> None:
    text = (ROOT / "docs/index.md").read_text()
    before, _, _ = text.partition("## ")
    commands, *_ = blocks(ROOT / "docs/index.md", "sh")
    assert len(commands.splitlines()) == 2
    program, *_ = blocks(ROOT / "docs/index.md", "python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    assert commands in before
    assert "](assets/report.png#only-light)" in before
    assert "](assets/report-dark.png#only-dark)" in before
    assert program in before


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_programs_of_readme_and_home_page_and_example_train(
    tmp_path: Path,
) -> None:
    program, *_ = blocks(ROOT / "README.md", "python")
    assert "max_num_steps=30" in program
    (tmp_path / "run.py").write_text(program.replace("steps=30", "steps=2"))
    model = str(build_model(ModelBuildConfig(hidden_size=16), tmp_path / "model"))
    rows = [f'{{"prompt": "{n}=", "answer": "{n}"}}' for n in range(700)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    example = [str(ROOT / "examples/focal.py"), model, "rows.jsonl"]
    home, *_ = blocks(ROOT / "docs/index.md", "python")
    assert "max_num_steps=30" in home
    home = home.replace("steps=30", "steps=2").replace("tiny-model", "home-model")
    (tmp_path / "home.py").write_text(home)
    out = run(tmp_path, ["run.py"], ["home.py"], example).strip().splitlines()
    *_, readme, home_page, focal = out
    assert "step_2" in readme
    assert "step_2" in home_page
    assert "policy/weights" in focal


@pytest.mark.parametrize("page", ["docs/concepts/architecture.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"`(rl_\w+/[\w/]+(?:\.py|/))`", (ROOT / page).read_text()))
    assert len(named) > 20
    missing = [
        name
        for name in sorted(named)
        if not any(ROOT.glob(f"packages/*/src/{name.rstrip('/')}"))
    ]
    assert missing == []
