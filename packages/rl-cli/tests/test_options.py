from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from rl_cli.options import Number, Whole


def said_of(kind: click.ParamType, text: str) -> tuple[int, str]:
    @click.command()
    @click.option("--value", type=kind)
    def command(value: float) -> None:
        click.echo(repr(value))

    result = CliRunner().invoke(command, ["--value", text])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (Whole(), "0", "must be an integer from 1 to 2,147,483,647: got 0"),
        (
            Whole(),
            "9" * 20,
            f"must be an integer from 1 to 2,147,483,647: got {'9' * 20}",
        ),
        (Whole(), "9" * 5000, "must be an integer"),
        (Whole(0, 9), "ten", "must be an integer: got ten"),
        (Whole(0, 9), "1.5", "must be an integer: got 1.5"),
        (Number(above=0, most=1), "0", "must be a number greater than 0 and at most 1"),
        (
            Number(above=0, most=1),
            "1.1",
            "must be a number greater than 0 and at most 1",
        ),
        (Number(), "-1", "must be a number of at least 0: got -1"),
        (Number(), "nan", "must be a number of at least 0: got nan"),
        (Number(), "inf", "must be a number of at least 0: got inf"),
        (Number(), "much", "must be a number of at least 0: got much"),
    ],
)
def test_what_does_not_fit_is_a_usage_error(
    kind: click.ParamType, text: str, expected: str
) -> None:
    code, said = said_of(kind, text)
    assert code == 2
    assert expected in " ".join(said.split())


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [(Whole(0), "0", "0"), (Whole(most=7), "7", "7"), (Number(most=1), "1", "1.0")],
)
def test_limits_belong_to_the_range(
    kind: click.ParamType, text: str, value: str
) -> None:
    assert said_of(kind, text) == (0, f"{value}\n")
