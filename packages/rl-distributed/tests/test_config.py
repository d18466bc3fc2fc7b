from __future__ import annotations

import enum
import json
import pickle
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, strategies as st
from pydantic import Field, model_validator

from rl_distributed.config import (
    Config,
    apply_overrides,
    explain_config,
    interpolate,
    load_config,
    merge_configs,
    override_value,
    parse_overrides,
    yaml_file,
)
from rl_distributed.errors import ConfigError


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Engine(Config):
    """What drives it."""

    name: str = "steam"
    """Its
    kind."""
    power: float = Field(1.0, gt=0)
    options: dict[str, Any] = Field(default_factory=lambda: {"gears": [1, 2]})


class Radio(Config):
    band: Literal["short", "long"] = "short"
    channels: int


class Car(Config):
    model_name: str
    engine: Engine = Engine(power=2.5)
    radio: Radio | None = None
    spare: list[Engine] = Field(default_factory=list)
    tags: str | list[str] = "none"
    color: Color = Color.RED
    home: Path | None = None


class Free(Config):
    anything: Any = None


class Fleet(Config):
    car: Car
    """The one car."""
    size: int = Field(3, gt=0)
    ready: bool = False
    parts: dict[str, Engine] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _small_when_ready(self) -> Fleet:
        if self.ready and self.size > 10:
            raise ValueError("size must be at most 10 when ready")
        return self


CAR = {"car": {"model_name": "t"}}


def error_of(data: Any, source: str | None = "x.yaml") -> str:
    with pytest.raises(ConfigError) as caught:
        Fleet.from_dict(data, source=source)
    return str(caught.value)


# ------------------------------------------------------------------------- validation


def test_round_trip_and_equality() -> None:
    config = Fleet.from_dict({**CAR, "parts": {"left": {"power": 4}}})
    assert Fleet.from_dict(config.to_dict()) == config
    assert config.to_dict()["car"]["color"] == "red"
    assert pickle.loads(pickle.dumps(config)) == config


def test_every_problem_is_reported_at_once_with_its_path() -> None:
    text = error_of(
        {
            "car": {
                "model_nme": "t",
                "engine": {"powr": 1, "power": "much"},
                "spare": [{"nme": "x"}],
                "radio": {"band": "lng"},
            },
            "size": 0,
            "ready": "perhaps",
        }
    )
    assert text.startswith("8 problems in x.yaml:")
    for expected in (
        "car.model_nme is not a known key; did you mean 'car.model_name'?",
        "car.engine.powr is not a known key; did you mean 'car.engine.power'?",
        'car.engine.power must be a number: got "much"',
        "car.spare.0.nme is not a known key; did you mean 'car.spare.0.name'?",
        "car.radio.channels is required, but not set",
        "car.radio.band must be 'short' or 'long': got \"lng\"; did you mean 'long'?",
        "size must be greater than 0: got 0",
        'ready must be true or false: got "perhaps"',
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({**CAR, "size": True}, "size must be a number: got true"),
        ({**CAR, "size": 1.5}, "size must be an integer: got 1.5"),
        ({**CAR, "car": 3}, "car must be a mapping"),
        ({}, "car is required, but not set"),
        (
            {"car": {"model_name": "t", "tags": 3}},
            "car.tags must be a string: got 3; put it in quotes, or",
        ),
        ({"car": {"model_name": "t", "color": "blu"}}, "did you mean 'blue'?"),
        ({**CAR, "ready": True, "size": 11}, "size must be at most 10 when ready"),
        ({**CAR, "parts": {"left": {"pwr": 1}}}, "did you mean 'parts.left.power'?"),
        # the same name elsewhere
        ({**CAR, "channels": 2}, "did you mean 'car.radio.channels'?"),
        ({**CAR, "zzz": 2}, "known keys: car, size, ready, parts"),
        ({"car": {"model-name": "t"}}, "did you mean 'car.model_name'?"),
        ({**CAR, "size": 10**30}, "size must be at most 2147483647 in size"),
        ({**CAR, "size": -(10**30)}, "size must be at most 2147483647 in"),
        ([1], "x.yaml must be a mapping of keys to values: got list"),
    ],
)
def test_a_wrong_value_names_key_rule_and_value(data: Any, expected: str) -> None:
    assert expected in error_of(data)


class Brakes(Config):
    """A section whose rules name its keys in several ways."""

    force: float = 1.0
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Brakes:
        if message := self.options.get("message"):
            raise ValueError(message)
        return self


class Train(Config):
    brakes: Brakes = Field(default_factory=Brakes)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("force must be low", "brakes.force must be low"),
        ("options.message must go", "brakes.options.message must go"),
        ("brakes.options.message must go", "brakes.options.message must go"),
        ("brakes must be off", "brakes must be off"),
        ("must be off", "must be off"),
        ("one of two has to go", "brakes: one of two has to go"),
    ],
)
def test_a_rule_of_a_section_names_each_key_once(message: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Train.from_dict({"brakes": {"options": {"message": message}}})
    path = "" if expected.startswith("brakes") else "brakes "
    assert str(caught.value) == f"{path}{expected}"


def test_keys_that_yaml_reads_as_numbers_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "car:\n  model_name: t\n  spare: [{7: a}]\n  engine:\n    1: fast\nnull: 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        Fleet.from_yaml(tmp_path / "x.yaml")
    said = str(caught.value)
    assert "3 problems in " in said
    assert "car.spare.0.7 is not a known key; known keys: name, power, opt" in said
    assert "car.engine.1 is not a known key" in said
    assert "x.yaml:5)" in said
    assert "None is not a known key; known keys: car, size" in said
    with pytest.raises(ConfigError, match=r"engine\.1 is not a known key"):
        Car(model_name="t", engine={1: "fast"})
    # Where keys are free, they may be numbers.
    assert Free(anything={2: "b"}).anything == {2: "b"}


def test_a_number_of_thousands_of_digits_is_no_number() -> None:
    text = "size: " + "9" * 5_000
    for parsed in (
        yaml_file.parse_scalar(text[6:]),
        override_value.parse_value(text[6:]),
    ):
        assert "size must be an integer of fewer" in error_of({**CAR, "size": parsed})


def test_direct_construction_raises_the_same_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'model_name'"):
        Car(model_nam="x")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"car\.engine\.power must be greater than 0"):
        Fleet(car={"model_name": "x", "engine": {"power": -1}})  # type: ignore[arg-type]


def test_it_is_frozen() -> None:
    config = Fleet.from_dict(CAR)
    with pytest.raises(ValueError, match="frozen"):
        config.size = 4  # type: ignore[misc]
    assert config.replace(size=4).size == 4
    with pytest.raises(ConfigError, match="sise is not a known key"):
        config.replace(sise=4)


def test_a_partial_section_keeps_the_other_defaults_of_the_field() -> None:
    config = Fleet.from_dict({"car": {"model_name": "t", "engine": {"name": "diesel"}}})
    assert config.car.engine == Engine(name="diesel", power=2.5)


def test_infinity_survives_a_round_trip() -> None:
    engine = Engine(power=float("inf"))
    assert Engine.from_dict(engine.to_dict()) == engine


# ------------------------------------------------------------------------------- files


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_yaml_scalars_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    write(
        tmp_path,
        a="float: 1e-5\nplain: 1.5\nint: 1_000\nyes: on\nno: 'true'\nempty:\n"
        "date: 2024-01-02\ninf: -.inf\nversion: 2024_01\ntime: 12:30\nt: TRUE\nd: .5\n",
    )
    assert load_config(tmp_path / "a.yaml") == {
        "float": 1e-5,
        "plain": 1.5,
        "int": 1000,
        "yes": "on",
        "no": "true",
        "empty": None,
        "date": "2024-01-02",
        "inf": float("-inf"),
        "version": "2024_01",
        "time": "12:30",
        "t": True,
        "d": 0.5,
    }


def test_inheritance_merges_and_later_parents_win(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", base="a: {x: 1, y: 2, l: [1, 2]}\nb: base\n")
    write(tmp_path, second="a: {y: 3}\nb: second\nc: {q: 1, r: 2}\n")
    write(
        tmp_path,
        child="defaults: [sub/base, second.yaml]\n"
        "a: {z: 4, l: [9]}\nc: {_override_: true, s: 5}\n",
    )
    assert load_config(tmp_path / "child.yaml") == {
        "a": {"x": 1, "y": 3, "z": 4, "l": [9]},
        "b": "second",
        "c": {"s": 5},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defaults: a\n", "go in a circle: .*a.yaml -> .*a.yaml"),
        ("defaults: gone\n", "a.yaml:1 inherits from 'gone', but .* does not exist"),
        ("defaults: 3\n", "'defaults' must be a path or a list of paths"),
        ("x: 1\nx: 2\n", "a.yaml:2 is not valid YAML: key 'x' is written twice"),
        ("x: [1\ny: 2\n", "a.yaml:2 is not valid YAML"),
        ("- 1\n", "must hold a mapping of keys to values: got list"),
        ("x: {_override_: 3}\ny: 1\n", "x._override_ must be true or false"),
        ("x: !!python/object:os.system {}\n", "not valid YAML"),
    ],
)
def test_a_broken_file_says_what_is_wrong(
    tmp_path: Path, text: str, expected: str
) -> None:
    write(tmp_path, a=text, base="x: {y: 1}\n")
    if "_override_" in text:
        write(tmp_path, a=f"defaults: base\n{text}")
    with pytest.raises(ConfigError, match=expected):
        load_config(tmp_path / "a.yaml")


def test_a_cycle_over_several_files_is_shown_whole(tmp_path: Path) -> None:
    write(tmp_path, a="defaults: b\n", b="defaults: [c]\n", c="defaults: b.yaml\n")
    with pytest.raises(ConfigError, match=r"b\.yaml -> .*c\.yaml -> .*b\.yaml"):
        load_config(tmp_path / "a.yaml")


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    write(tmp_path, a="# nothing\n")
    assert load_config(tmp_path / "a.yaml") == {}


def test_errors_name_file_line_and_override(tmp_path: Path) -> None:
    write(tmp_path, base="car:\n  model_name: t\n  engin: {}\n")
    write(tmp_path, a="defaults: base\nsize: ${car.engine.power}\n")
    with pytest.raises(ConfigError) as caught:
        Fleet.from_yaml(tmp_path / "a.yaml", ["ready=3"])
    text = str(caught.value)
    assert "car.engin is not a known key; did you mean 'car.engine'? (" in text
    assert "base.yaml:3)" in text
    assert "size must be an integer: got 2.5" in text
    assert "a.yaml:2)" in text
    assert "(override 'ready=3')" in text


# ----------------------------------------------------------------------- interpolation


def test_interpolation_keeps_types_and_nests() -> None:
    data = {
        "a": {"n": 3, "s": "x", "list": [1, "${a.n}"], "near": "${.n}", "up": "${..b}"},
        "b": "${c}",
        "c": True,
        "text": "n=${a.n} b=${b} nothing=${nothing}",
        "nothing": None,
        "copy": "${a}",
        "product": "${mul:${a.n},${add:1, 1}}",
        "ratio": "${div:${a.n},2}",
        "literal": "\\${a.n} costs",
        "item": "${a.list.1}",
    }
    result = interpolate(data)
    assert result["a"] == {
        "n": 3,
        "s": "x",
        "list": [1, 3],
        "near": 3,
        "up": True,
    }
    assert result["copy"] == result["a"]
    assert result["text"] == "n=3 b=true nothing=null"
    assert (result["product"], result["ratio"], result["item"]) == (6, 1.5, 3)
    assert result["literal"] == "${a.n} costs"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"a": "${bb}", "b": 1}, "a refers to 'bb', which is not set"),
        ({"a": "${b.lenght}", "b": {"length": 1}}, "did you mean 'length'?"),
        ({"a": "${b}", "b": "${a}"}, "refers to itself: a -> b -> a"),
        ({"a": "${a}"}, "refers to itself"),
        ({"a": {"b": "${a}"}}, "refers to itself"),
        ({"a": "x${b}", "b": {"c": 1}}, "into the middle of a string"),
        ({"a": "${b", "b": 1}, "without its '}'"),
        ({"a": "${mull:1,2}"}, "unknown function 'mull'.*did you mean 'mul'"),
        ({"a": "${div:1,0}"}, "cannot compute"),
        ({"a": "${mul:b}", "b": 1}, None),
        ({"a": "${mul:b,999999999999}"}, "a cannot compute.*'b' is no number"),
        ({"a": "${mul:${b},99999999}", "b": [1]}, "cannot compute.*is no number"),
        ({"a": "${b.²}", "b": [1]}, "refers to 'b.²', which is not set"),
        ({"a": "${}"}, "refers to no key"),
        ({"a": "${...b}"}, "refers to no key"),
    ],
)
def test_a_broken_interpolation_names_the_key(
    data: dict[str, Any], expected: str | None
) -> None:
    if expected is None:
        assert interpolate(data)["a"] == "b"
        return
    with pytest.raises(ConfigError, match=expected):
        interpolate(data)


def test_interpolation_finds_defaults_of_the_schema() -> None:
    data = {**CAR, "size": "${mul:${car.engine.power},2}"}
    assert interpolate(data, Fleet)["size"] == 5.0
    with pytest.raises(ConfigError, match="is not set"):
        interpolate(data)


# --------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-2", -2),
        ("1e-5", 1e-5),
        ("1.0", 1.0),
        (".inf", float("inf")),
        ("True", True),
        ("false", False),
        ("null", None),
        ("", ""),
        ("a b", "a b"),
        ("'3'", "3"),
        ('"a,b"', "a,b"),
        (r"'it\'s'", "it's"),
        (r"a\,b", "a,b"),
        ("path/to:8080-x=y", "path/to:8080-x=y"),
        ("[]", []),
        ("[1,2.5, a b ,'c,d',[true]]", [1, 2.5, "a b", "c,d", [True]]),
        ("{}", {}),
        ("{a:1,b:{c: x},'d e':[1]}", {"a": 1, "b": {"c": "x"}, "d e": [1]}),
        ("${other.key}", "${other.key}"),
        ("[${a.b},2]", ["${a.b}", 2]),
        ("[1,]", [1]),
    ],
)
def test_override_values_are_typed(text: str, value: Any) -> None:
    (override,) = parse_overrides([f"k={text}"])
    assert override.value == value
    assert type(override.value) is type(value)


def test_override_actions_and_paths() -> None:
    parsed = parse_overrides(["a.b=1", "+c=2", "++d.e=3", "~f", "~g=4", r"h.i\.j=5"])
    assert [(item.action, item.path) for item in parsed] == [
        ("set", ("a", "b")),
        ("add", ("c",)),
        ("force", ("d", "e")),
        ("delete", ("f",)),
        ("delete", ("g",)),
        ("set", ("h", "i.j")),
    ]


def test_malformed_overrides_are_all_reported() -> None:
    bad = ["a", "--foo", "=3", "a=1,2", "a=[1", "a={b}", "a='x", "a.=3", "a b=1"]
    with pytest.raises(ConfigError) as caught:
        parse_overrides(bad)
    text = str(caught.value)
    assert text.startswith(f"{len(bad)} problems in the overrides")
    assert all(repr(item) in text for item in bad)
    assert "write a list as [a,b]" in text
    with pytest.raises(ConfigError, match="must be a list of strings"):
        parse_overrides("a=1")


def applied(data: dict[str, Any], *texts: str, schema: Any = None) -> dict[str, Any]:
    return dict(apply_overrides(data, parse_overrides(texts), schema))


def test_overrides_apply_in_order_to_a_copy() -> None:
    data = {"a": {"b": 1, "l": [1, 2]}, "c": 2}
    result = applied(
        data, "a.b=5", "+a.n.m=6", "++c=7", "++z=8", "a.l.1=9", "~c=7", "a={b: 3}"
    )
    assert result == {"a": {"b": 3, "l": [1, 9], "n": {"m": 6}}, "z": 8}
    assert data == {"a": {"b": 1, "l": [1, 2]}, "c": 2}
    assert applied(data, "a={_override_: true, q: 1}")["a"] == {"q": 1}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.bb=1", "a.bb is not a known key; did you mean 'a.b'.*write .a.bb="),
        ("a.b.c=1", "a.b.c cannot be set: a.b is 1, no section"),
        ("q.r=1", "q is not a known key; to add it, write .q.r="),
        ("+a.b=1", "a.b is set already"),
        ("+a.b.c=1", "a.b is 1, no section"),
        ("~a.x", "a.x cannot be removed: it is not set"),
        ("~a.b=7", "is not removed: its value is 1, not 7"),
        ("++l.7=1", "no index into a list of 2 items"),
        ("a={q: 1}", "a.q is not a known key"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        applied({"a": {"b": 1}, "l": [1, 2]}, override)


def test_with_a_schema_keys_that_are_not_in_the_data_can_be_set() -> None:
    result = applied(
        CAR,
        "car.radio.channels=5",
        "car.engine.options.turbo=true",
        "car.spare=[{name: z}]",
        "parts.left.power=2",
        schema=Fleet,
    )
    config = Fleet.from_dict(result)
    assert config.car.radio == Radio(channels=5)
    assert config.car.engine.options == {"gears": [1, 2], "turbo": True}
    assert config.car.engine.power == 2.5
    assert config.parts["left"].power == 2


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("car.engine.powr=1", "did you mean 'car.engine.power'"),
        ("car.radio.chanels=1", "did you mean 'car.radio.channels'"),
        ("car.spare=[{nam: 1}]", "car.spare.0.nam is not .* 'car.spare.0.name'"),
        ("car.engine={powr: 1}", "did you mean 'car.engine.power'"),
        ("siz=1", "did you mean 'size'"),
        ("size.x=1", "size has no keys of its own"),
        ("parts.left.pwer=1", "did you mean 'parts.left.power'"),
    ],
)
def test_with_a_schema_no_form_of_override_adds_an_unknown_key(
    prefix: str, override: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        applied(CAR, prefix + override, schema=Fleet)


def test_all_refused_overrides_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        applied(CAR, "siz=1", "~ready", "car.engin.power=2", schema=Fleet)
    assert str(caught.value).startswith("3 problems in the overrides")
    assert "it has its default" in str(caught.value)


def test_interpolated_overrides_are_resolved(tmp_path: Path) -> None:
    write(tmp_path, a="car: {model_name: t}\nsize: 4\n")
    config = Fleet.from_yaml(tmp_path / "a.yaml", ["car.model_name=v${size}"])
    assert config.car.model_name == "v4"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_characters="$\\"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abcd", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def as_override(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(map(as_override, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{as_override(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


@given(json_values)
def test_any_value_can_be_written_as_an_override(value: Any) -> None:
    (override,) = parse_overrides([f"k={as_override(value)}"])
    assert override.value == value


trees = st.dictionaries(st.sampled_from("abc"), json_values, max_size=3)


@given(trees, trees)
def test_merging_is_pure_and_the_extra_wins(base: Any, extra: Any) -> None:
    before = repr((base, extra))
    merged = merge_configs(base, extra)
    assert repr((base, extra)) == before
    assert merge_configs(merged, extra) == merged
    assert merge_configs(base, {}) == base == merge_configs({}, base)
    for key, value in extra.items():
        if not isinstance(value, dict):
            assert merged[key] == value


# --------------------------------------------------------------------------- explaining


def test_explain_lists_every_key_with_type_default_and_doc() -> None:
    rows = {row.path: row for row in explain_config(Fleet)}
    assert rows["car"].doc == "The one car."
    assert rows["car.model_name"].required
    assert rows["car.engine"].doc == "What drives it."
    assert rows["car.engine.name"].doc == "Its kind."
    assert rows["car.engine.power"].default == "2.5"
    assert rows["car.radio"].type == "Radio | null"
    assert rows["car.radio"].default == "null"
    assert rows["car.radio.band"].type == '"short" | "long"'
    assert rows["car.tags"].type == "str | list[str]"
    assert rows["car.color"].default == '"red"'
    assert rows["size"].default == "3"


# What a few lines can become


def powers(first: str, line: str, count: int = 30) -> str:
    """Return lines that each refer several times to the previous one."""
    lines = [
        line.replace("BEFORE", f"a{n - 1}").replace("N", f"a{n}")
        for n in range(1, count)
    ]
    return "\n".join([first, *lines])


TOO_MUCH = {
    "aliases": (
        powers("a0: &a0 [x, x]", "N: &N [*BEFORE, *BEFORE, *BEFORE, *BEFORE]"),
        r"file\.yaml:9 has aliases that stand for more than 100,000 values",
    ),
    "merged aliases": (
        powers("a0: &a0 {x: 1}", "N: &N {<<: *BEFORE, l: *BEFORE, m: *BEFORE}"),
        "has aliases that stand for more than 100,000 values",
    ),
    "an alias in itself": (
        "a: &a [1, *a]",
        r"file\.yaml:1 has the alias \*a in what it stands for",
    ),
    "a list": ("a: " + "[" * 3000 + "]" * 3000, "file.yaml:1 nests more than 100"),
    "a mapping": ("a: " + "{b: " * 3000 + "}" * 3000, "nests more than 100 levels"),
    "lines": (
        "\n".join(" " * n + "k:" for n in range(300)),
        r"file\.yaml:100 nests more than 100 levels",
    ),
    "a key": ("? " + "[" * 300 + "]" * 300 + "\n: 1", "nests more than 100 levels"),
    "references to lists": (
        powers("a0: [x, x, x, x]", "N: ['${BEFORE}', '${BEFORE}', '${BEFORE}']"),
        "references together copy more than 100,000 values",
    ),
    "references in texts": (
        powers("a0: xxxx", "N: '${BEFORE}${BEFORE}${BEFORE}'"),
        "becomes more than 1,000,000 characters",
    ),
    "products": (
        powers("a0: 999", "N: ${mul:${BEFORE},${BEFORE}}"),
        "the result has more than 1024 bits",
    ),
    "a chain of references": (
        "\n".join(f"a{n}: ${{a{n + 1}}}" for n in range(300)),
        "refers over more than 50 steps",
    ),
    "functions in functions": (
        "a: " + "${add:1," * 300 + "1" + "}" * 300,
        "refers over more than 50 steps",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_grows_beyond_measure_is_refused(name: str, tmp_path: Path) -> None:
    text, expected = TOO_MUCH[name]
    file = tmp_path / "file.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(file)


def test_ordinary_aliases_and_depths_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(
        "base: &base {lr: 1, betas: [0.9, 0.99]}\n"
        "one: {<<: *base, lr: 2}\n"
        "all: [*base, *base]\n"
        f"deep: {'[' * 90}{']' * 90}\n"
    )
    loaded = load_config(file)
    base = {"lr": 1, "betas": [0.9, 0.99]}
    assert loaded["one"] == {**base, "lr": 2}
    assert loaded["all"] == [base, base]
    assert loaded["deep"] != []


def test_parents_that_share_parents_are_read_once(tmp_path: Path) -> None:
    for n in range(40):
        (tmp_path / f"p{n}.yaml").write_text(
            f"defaults: [p{n + 1}, p{n + 1}]\nk{n}: {n}\n" if n < 39 else "end: 1\n"
        )
    loaded = load_config(tmp_path / "p0.yaml")
    assert loaded == {"end": 1, **{f"k{n}": n for n in range(39)}}
    assert loaded.origin(("k3",)) == f"{tmp_path / 'p3.yaml'}:2"
    for n in range(100):
        (tmp_path / f"q{n}.yaml").write_text(f"defaults: q{n + 1}\n")
    with pytest.raises(ConfigError, match="go back more than 50 generations"):
        load_config(tmp_path / "q0.yaml")


def test_data_from_programs_are_bounded_too() -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    around: dict[str, Any] = {}
    around["self"] = [around, around]
    for value in (deep, {"a": {"b": deep}}, around):
        for use in (
            lambda value=value: Free.from_dict({"anything": value}),
            lambda value=value: Free(anything=value),
            lambda value=value: merge_configs({}, {"anything": value}),
            lambda value=value: apply_overrides({"anything": value}, []),
        ):
            with pytest.raises(
                ConfigError, match=r"anything in .* nests more than 100"
            ):
                use()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=" + "[" * 3000, "nested more than 50 deep"),
        ("+" + ".".join(["b"] * 3000) + "=1", "the key has more than 100 parts"),
    ],
)
def test_overrides_are_bounded_too(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        parse_overrides([text])
    assert len(str(caught.value)) < 500
