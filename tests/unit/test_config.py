"""Settings: precedence, checks, and errors that name what is wrong."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

import lightning_ft.config
from lightning_ft.config import ALIASES, Settings, checkpoint_interval, parse_endpoint, unknown_variables


def test_precedence_argument_variable_alias_default() -> None:
    """An argument beats its variable, which beats the alias, which beats the default."""
    environ = {"LIGHTNING_FT_MAX_FAILURES": "3", "HCCL_FT_MAX_FAILURES": "5"}
    assert Settings.resolve(environ, max_failures=1).max_failures == 1
    assert Settings.resolve(environ).max_failures == 3
    assert Settings.resolve({"HCCL_FT_MAX_FAILURES": "5"}).max_failures == 5
    assert Settings.resolve({}).max_failures is None


READ_AS = {"enable": ("0", False), "max_failures": ("5", 5), "checkpoint_interval": ("30s", (0, 30.0))}


@pytest.mark.parametrize("name", ALIASES)
def test_each_alias_is_read_where_its_variable_is_not_set(name: str) -> None:
    """An empty variable counts as not set."""
    text, value = READ_AS[name]
    environ = {ALIASES[name]: text, f"LIGHTNING_FT_{name.upper()}": ""}
    if name == "checkpoint_interval":
        assert checkpoint_interval(environ) == value
    else:
        assert Settings.resolve(environ) == dataclasses.replace(Settings(), **{name: value})


@pytest.mark.parametrize("name", ALIASES)
def test_variable_goes_before_its_alias_which_is_told_once(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If both say the same there is nothing to tell; nor to a child, whose agent has told it."""
    monkeypatch.setattr("lightning_ft.config._told", set())
    read = checkpoint_interval if name == "checkpoint_interval" else lambda environ: getattr(resolve(environ), name)
    resolve = Settings.resolve
    text, value = READ_AS[name]
    variable, alias = f"LIGHTNING_FT_{name.upper()}", ALIASES[name]
    assert read({variable: text, alias: text}) == value
    assert read({variable: text, alias: "1", "LIGHTNING_FT_MEMBER": "0/0"}) == value
    assert not caplog.records
    for other in ("1", "nonsense"):
        caplog.clear()
        assert [read({variable: text, alias: other}) for _ in range(3)] == [value] * 3
        assert [record.getMessage() for record in caplog.records] == [
            f"the environment has both {variable}={text!r} and {alias}={other!r}: the first goes before the second"
        ]


def test_an_argument_silences_the_environment() -> None:
    """What is not used can't be wrong."""
    assert Settings.resolve({"LIGHTNING_FT_MAX_FAILURES": "many"}, max_failures=1).max_failures == 1


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"HCCL_FT_MAX_FAILURES": "-1"}, "at least 0.* has HCCL_FT_MAX_FAILURES='-1'"),
        ({"LIGHTNING_FT_MIN_WORLD_SIZE": "0"}, "at least 1.* has LIGHTNING_FT_MIN_WORLD_SIZE='0'"),
        (
            {"LIGHTNING_FT_HEARTBEAT_TIMEOUT": "0.5", "LIGHTNING_FT_SPARES": "1"},
            r"must hold.* has LIGHTNING_FT_HEARTBEAT_TIMEOUT='0.5'\)",
        ),
        ({"LIGHTNING_FT_METRICS_PORT": "65536"}, "from 1 to 65535.* has LIGHTNING_FT_METRICS_PORT='65536'"),
        ({"LIGHTNING_FT_COORDINATOR": "here"}, "expected host:port.* has LIGHTNING_FT_COORDINATOR='here'"),
    ],
)
def test_a_variable_with_a_value_that_is_not_allowed_is_named(environ: dict[str, str], told: str) -> None:
    """It can be read, but the setting has a rule: the variable, and no other, is in the message."""
    with pytest.raises(ValueError, match=told):
        Settings.resolve(environ)


def test_a_rule_that_an_argument_breaks_names_no_variable() -> None:
    """The environment is not to blame."""
    with pytest.raises(ValueError, match=r"min_world_size must be at least 1, got 0$"):
        Settings.resolve({"LIGHTNING_FT_SPARES": "1"}, min_world_size=0)


VALUES = {
    "min_world_size": ("2", 2),
    "rejoin_timeout": ("60", 60.0),
    "max_failures": ("3", 3),
    "heartbeat_interval": ("0.5", 0.5),
    "heartbeat_timeout": ("20", 20.0),
    "timeout": ("60", 60.0),
    "evict_stragglers": ("1", True),
    "max_link_failures": ("5", 5),
    "respawn": ("0", False),
    "max_restarts": ("7", 7),
    "max_world_size": ("8", 8),
    "spares": ("1", 1),
    "on_resize": ("scale_lr", "scale_lr"),
    "uneven": ("exact", "exact"),
    "verify_every_n_steps": ("10", 10),
    "verify_state_every_n_steps": ("100", 100),
    "verify_chunk_bytes": ("65536", 65536),
    "verify_policy": ("evict", "evict"),
    "topology": ("tree", "tree"),
    "catch_up": ("blocking", "blocking"),
    "catch_up_slowdown": ("0.25", 0.25),
    "coordinator": ("node0:29400", "node0:29400"),
    "process_group_backend": ("gloo", "gloo"),
    "event_log": ("events.jsonl", "events.jsonl"),
    "metrics_port": ("9464", 9464),
    "metrics_host": ("node0", "node0"),
    "enable": ("0", False),
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Settings)])
def test_each_setting_can_come_from_the_environment(field: str) -> None:
    """`LIGHTNING_FT_<NAME>` sets it, and it alone."""
    text, value = VALUES[field]
    settings = Settings.resolve({f"LIGHTNING_FT_{field.upper()}": text})
    assert settings == dataclasses.replace(Settings(), **{field: value})
    assert settings != Settings()


def test_an_empty_variable_counts_as_unset() -> None:
    """Job scripts that export an empty variable mean the default."""
    assert Settings.resolve({"LIGHTNING_FT_TIMEOUT": ""}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LIGHTNING_FT_TIMEOUT", "soon"),
        ("LIGHTNING_FT_MIN_WORLD_SIZE", "1.5"),
        ("LIGHTNING_FT_ENABLE", "maybe"),
        ("HCCL_FT_ENABLE", "2"),
        ("HCCL_FT_MAX_FAILURES", "few"),
        ("LIGHTNING_FT_CHECKPOINT_INTERVAL", "0"),
        ("HCCL_FT_CHECKPOINT_INTERVAL", "often"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(variable: str, value: str) -> None:
    """The error tells the variable and its value."""
    with pytest.raises(ValueError, match=f"{variable}='{value}'"):
        checkpoint_interval({variable: value}) if "INTERVAL" in variable else Settings.resolve({variable: value})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"min_world_size": 0}, "min_world_size must be at least 1, got 0"),
        ({"max_failures": -1}, "max_failures must be at least 0"),
        ({"max_link_failures": -1}, "max_link_failures must be at least 0, got -1"),
        ({"heartbeat_interval": 20.0}, "heartbeat_interval < heartbeat_timeout < timeout"),
        ({"heartbeat_timeout": 1800.0}, "heartbeat_interval < heartbeat_timeout < timeout"),
        ({"heartbeat_interval": float("nan")}, "heartbeat_interval < heartbeat_timeout < timeout"),
        ({"coordinator": "somewhere"}, "expected host:port"),
        ({"catch_up": "lazy"}, "catch_up must be one of 'blocking', 'pipelined', got 'lazy'"),
        ({"catch_up_slowdown": 0.0}, "catch_up_slowdown must be > 0 and <= 1, got 0.0"),
        ({"catch_up_slowdown": 1.5}, "catch_up_slowdown must be > 0 and <= 1, got 1.5"),
        ({"verify_policy": "ask"}, "verify_policy must be one of 'warn', 'heal', 'evict', got 'ask'"),
        ({"verify_every_n_steps": -1}, "verify_every_n_steps must be at least 0, got -1"),
        ({"verify_chunk_bytes": 0}, "verify_chunk_bytes must be at least 16, got 0"),
        ({"topology": "mesh"}, "topology must be one of 'ring', 'tree', 'auto', got 'mesh'"),
        ({"uneven": "drop"}, "uneven must be one of 'pad', 'exact', got 'drop'"),
        ({"on_resize": "scale"}, "on_resize must be one of 'keep', 'scale_lr', 'keep_global_batch', got 'scale'"),
        ({"process_group_backend": "mpi"}, "process_group_backend must be"),
    ],
)
def test_a_wrong_value_is_told_with_the_rule(arguments: dict[str, object], told: str) -> None:
    """The error names the setting, the rule and the value."""
    with pytest.raises(ValueError, match=told):
        Settings.resolve({}, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"min_world_size": "two"}, {"min_world_size": True}, {"timeout": "60"}, {"max_failures": 1.5}, {"coordinator": 1}],
    ids=str,
)
def test_a_value_of_another_type_is_told(arguments: dict[str, object]) -> None:
    """Not only by what it breaks later."""
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name} must be .*, got"):
        Settings.resolve({}, **arguments)


def test_misspelt_variables_are_found() -> None:
    """Whatever has our prefix and is read by nobody."""
    environ = {"LIGHTNING_FT_MIN_WORLD": "2", "LIGHTNING_FT_TIMEOUT": "9", "LIGHTNING_FT_TOKEN": "x", "PATH": ""}
    assert unknown_variables(environ) == ["LIGHTNING_FT_MIN_WORLD"]


def test_every_variable_that_is_read_is_known() -> None:
    """The sources name them with the prefix or by the agent's constant."""
    package = pathlib.Path(lightning_ft.config.__file__).parent
    text = "".join(path.read_text() for path in package.rglob("*.py"))
    named = set(re.findall(r"LIGHTNING_FT_[A-Z_]*[A-Z]", text)) | {
        f"LIGHTNING_FT_{name}" for name in re.findall(r"\{ENV_PREFIX\}([A-Z_]+)", text)
    }
    assert unknown_variables(dict.fromkeys(named, "")) == []


def test_an_unknown_setting_is_refused() -> None:
    """A misspelt argument is an error, not ignored."""
    with pytest.raises(ValueError, match="unknown setting 'max_failure'"):
        Settings.resolve({}, max_failure=1)


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_an_endpoint_needs_host_and_port(text: str) -> None:
    """Whatever is not host:port is refused."""
    with pytest.raises(ValueError, match="host:port"):
        parse_endpoint(text)


def test_an_endpoint_may_be_ipv6() -> None:
    """Brackets are taken off."""
    assert parse_endpoint("[::1]:29500") == ("::1", 29500)
