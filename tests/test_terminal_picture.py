"""Pictures of terminals: what they show, cut off, and must not contain."""

from __future__ import annotations

import html
import re
import socket
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tools.terminal_picture import (
    Shown,
    draw_terminal,
    private_texts,
    run_all_as_in_terminal,
    run_as_in_terminal,
)

ROOT = Path(__file__).resolve().parents[1]


def texts(picture: str) -> str:
    """Return the lines of a picture."""
    root = ET.fromstring(picture)
    found: dict[float, str] = {}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        if "y" in text.attrib:
            line = float(text.attrib["y"])
            found[line] = found.get(line, "") + html.unescape(text.text or "")
    lines = [found[line].replace("\xa0", " ").rstrip() for line in sorted(found)]
    return "\n".join(lines).rstrip()


def test_a_picture_has_the_command_and_its_output_in_colour() -> None:
    picture = draw_terminal("rl x", "plain \x1b[31mred\x1b[0m [brackets] <b> & done\n")
    assert texts(picture) == "$ rl x\nplain red [brackets] <b> & done"
    [red] = re.findall(r"\.(terminal-r\d+) \{ fill: #ff8b82", picture)
    assert re.search(rf'class="{red}"[^>]*>red<', picture)
    # It loads nothing from elsewhere.
    assert set(re.findall(r"https?://[^\s\"]+", picture)) == {
        "http://www.w3.org/2000/svg"
    }
    assert "url(" not in picture.replace("url(#", "")


def test_long_outputs_are_cut_and_long_lines_wrapped() -> None:
    output = "\n".join([*(f"line {n}" for n in range(50)), "word " * 40])
    shown = texts(draw_terminal("rl x", output, width=40, most_lines=5))
    assert shown.splitlines()[1:] == [
        *(f"line {n}" for n in range(5)), "... 50 more lines"
    ]  # fmt: skip
    ends = texts(draw_terminal("rl x", "a\nb\nc\nd\ne", most_lines=3, last_lines=1))
    assert ends.splitlines()[1:] == ["a", "b", "... 2 more lines", "e"]
    whole = texts(draw_terminal("rl x", output, width=40, most_lines=99)).splitlines()
    assert len(whole) == 1 + 55
    assert max(map(len, whole)) <= 40


def test_texts_of_the_machine_are_found(tmp_path: Path) -> None:
    assert private_texts("runs/a and ~/b", tmp_path) == []
    assert private_texts(f"in {tmp_path}/x", tmp_path) == [str(tmp_path)]
    assert str(ROOT) in private_texts(f"File {ROOT}/packages", tmp_path)


def test_the_name_of_the_machine_is_found_as_a_word_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    assert private_texts("Key: rl-q8vm0_Lvm-x7", tmp_path) == []
    for text in ("on vm", "http://vm:80", "vm.local", '"node": "vm"'):
        assert private_texts(text, tmp_path) == ["vm"]


def test_a_command_is_run_in_its_folder_with_its_own_home(tmp_path: Path) -> None:
    create = "rl keys create --name a --role viewer"
    run_as_in_terminal(create, tmp_path)
    assert (tmp_path / ".config" / "rl" / "keys.json").is_file()
    with pytest.raises(ValueError, match=r"exit code 2, not 0:\n(?s:.*)did you mean"):
        run_as_in_terminal("rl trian", tmp_path)
    with pytest.raises(ValueError, match="only rl commands"):
        run_as_in_terminal("rm -r x", tmp_path)


def test_warm_processes_print_what_cold_ones_do(tmp_path: Path) -> None:
    commands = [Shown("rl runs .", width=60), Shown("rl runs gone", exit_code=2)]
    cold = [
        run_as_in_terminal(
            one.command, tmp_path, width=one.width, exit_code=one.exit_code
        )
        for one in commands
    ]
    assert run_all_as_in_terminal(commands, tmp_path) == cold
    assert cold[0] == "no runs in .\n"
    with pytest.raises(ValueError, match="exit code 2, not 0"):
        run_all_as_in_terminal([Shown("rl runs gone")], tmp_path)
