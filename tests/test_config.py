"""DecentConfig: where its values come from, and the one sentence that a user reads where something is wrong."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from decent_opt import CPDSGDM, PDSGDM, ConfigError, DecentConfig, Decentralized, Disagreement, LocalAdamW
from decent_opt.config import ALLOWED
from decent_opt.config_cli import app
from decent_opt.config_sources import VARIABLE
from decent_opt.integrations.ddp import GossipState, decentralize
from decent_opt.testing import RankPool, run_ranks
from decent_opt.topology import make_topology

runner = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


# -- errors: field, value, what is allowed ---------------------------------------------------------------------------

BAD_VALUES: list[tuple[str, Any, str]] = [  # field, value, the value as it is shown
    ("period", 0, "0"),
    ("period", -3, "-3"),
    ("period", True, "True"),
    ("period", 8.0, "8.0"),
    ("period", "8", "'8'"),
    ("period", None, "None"),
    ("period", [], "[]"),
    ("period", [(5, 4)], "[(5, 4)]"),
    ("period", [(0, 4), (0, 8)], "[(0, 4), (0, 8)]"),
    ("period", [(0, 4), (9, 8), (5, 2)], "[(0, 4), (9, 8), (5, 2)]"),
    ("period", [(0, 0)], "[(0, 0)]"),
    ("period", [(0, True)], "[(0, True)]"),
    ("period", [(False, 4)], "[(False, 4)]"),
    ("period", [(0, 4, 1)], "[(0, 4, 1)]"),
    ("period", [0, 4], "[0, 4]"),
    ("period", {"0": 4}, "{'0': 4}"),
    ("period", 10**5000, "a int with a number too long to show"),
    ("topology", None, "None"),
    ("topology", "", "''"),
    ("topology", 4, "4"),
    ("topology", True, "True"),
    ("topology", {"name": "ring"}, "{'name': 'ring'}"),
    ("topology", [], "[]"),
    ("topology", [[]], "[[]]"),
    ("topology", [0.5, 0.5], "[0.5, 0.5]"),
    ("topology", [[0.5, 0.5], [1.0]], "[[0.5, 0.5], [1.0]]"),
    ("topology", [[True]], "[[True]]"),
    ("topology", [["ring"]], "[['ring']]"),
    ("topology", [[10**400]], "[[1000000"),
    ("topology", [[[[1.0]]]], "[[[[1.0]]]]"),
    ("topology", np.ones(3), "array([1., 1., 1.])"),
    ("topology", torch.ones(()), "tensor(1.)"),
    ("warmup_steps", -1, "-1"),
    ("warmup_steps", 1.5, "1.5"),
    ("warmup_steps", "many", "'many'"),
    ("warmup_steps", None, "None"),
    ("warmup_steps", 10**16, "10000000000000000"),
    ("global_every", 0, "0"),
    ("global_every", False, "False"),
    ("global_every", [4], "[4]"),
    ("outer_momentum", 1.0, "1.0"),
    ("outer_momentum", -0.1, "-0.1"),
    ("outer_momentum", float("nan"), "nan"),
    ("outer_momentum", "0.5", "'0.5'"),
    ("outer_momentum", 10**400, "10000000"),
    ("momentum_sync", "globl", "'globl'"),
    ("momentum_sync", "line\nbreak", r"'line\nbreak'"),
    ("momentum_sync", ["local"], "['local']"),
    ("momentum_sync", "x" * 10_000, "..."),
    ("bucket_mb", 0, "0"),
    ("bucket_mb", float("inf"), "inf"),
    ("bucket_mb", 1e300, "1e+300"),
    ("bucket_mb", True, "True"),
    ("timeout", 0.0, "0.0"),
    ("timeout", "forever", "'forever'"),
    ("timeout", None, "None"),
    ("timeout", np.float32("inf"), "inf"),
    ("algorithm", "choco", "'choco'"),
    ("algorithm", None, "None"),
    ("compressor", 4, "4"),
    ("compressor", " ", "' '"),
    ("order", "stale", "'stale'"),
    ("gamma", 0.0, "0.0"),
    ("gamma", 1.5, "1.5"),
    ("gamma", True, "True"),
    ("gamma", "best", "'best'"),
    ("gamma", float("nan"), "nan"),
    ("dense", "*.bias", "'*.bias'"),
    ("dense", [1], "[1]"),
    ("seed", 0.5, "0.5"),
    ("seed", 2**63, "9223372036854775808"),
    ("buffers", "mean", "'mean'"),
    ("buffers", None, "None"),
    ("overlap_steps", -1, "-1"),
    ("overlap_steps", 1.5, "1.5"),
    ("message_dtype", "int8", "'int8'"),
    ("message_dtype", torch.bfloat16, "torch.bfloat16"),
    ("on_nonfinite", "ignore", "'ignore'"),
    ("on_nonfinite", True, "True"),
    ("on_peer_loss", "ignore", "'ignore'"),
    ("sync_init", 1, "1"),
    ("sync_init", "yes", "'yes'"),
    ("sync_init", np.int64(0), "0"),
]


def sentence_of(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        make()
    assert type(error.value) is ConfigError
    message = str(error.value)
    assert "\n" not in message and len(message) < 600
    assert ". " not in message and not message.endswith((".", " ", ";")), "one sentence, without a full stop"
    return message


@pytest.mark.parametrize(("field", "value", "shown"), BAD_VALUES, ids=[f"{f}-{s[:30]}" for f, _, s in BAD_VALUES])
def test_a_bad_value_is_named_with_its_field_and_what_is_allowed(field: str, value: Any, shown: str) -> None:
    for make in (
        lambda: DecentConfig(**{field: value}),
        lambda: DecentConfig.load({field: value}),
        lambda: PDSGDM(nn.Linear(2, 1).parameters(), config={field: value}),
        lambda: Decentralized(torch.optim.SGD(nn.Linear(2, 1).parameters()), **{field: value}),
    ):
        message = sentence_of(make)
        assert message.startswith(f"{field}: allowed is {ALLOWED[field]}, got ")
        assert shown in message.partition(", got ")[2]


def test_the_table_of_what_is_allowed_has_every_field() -> None:
    assert ALLOWED.keys() == DecentConfig.model_fields.keys()
    assert {field for field, _, _ in BAD_VALUES} == ALLOWED.keys()


ELSEWHERE: list[tuple[str, dict[str, Any], str]] = [  # algorithm, option, what is allowed
    ("pd", {"compressor": "topk"}, "nothing"),
    ("pd", {"gamma": 0.4}, "nothing"),
    ("pd", {"order": "paper"}, "nothing"),
    ("cpd", {"overlap_steps": 2}, "0"),
    ("cpd", {"message_dtype": "bfloat16"}, "None"),
    ("cpd", {"momentum_sync": "average"}, '"local"'),
]


@pytest.mark.parametrize(("algorithm", "option", "allowed"), ELSEWHERE)
def test_an_option_of_the_other_algorithm_is_refused(algorithm: str, option: dict[str, Any], allowed: str) -> None:
    (field,) = option
    message = sentence_of(lambda: DecentConfig(algorithm=algorithm, **option))
    assert message.startswith(f'{field}: allowed is {allowed} with algorithm="{algorithm}", got ')


COMPRESSED: list[tuple[dict[str, Any], str]] = [
    ({"compressor": "sing"}, "compressor: allowed are identity, "),
    ({"compressor": "sign:chunk=0"}, "compressor: chunk of sign must be a whole number from 1 on, got '0'"),
    ({"topology": "one-peer-exponential"}, 'topology: algorithm="cpd" needs one symmetric W for all rounds'),
    ({"topology": "exponential"}, 'topology: algorithm="cpd" needs one symmetric W for all rounds'),
]


def compressed(rank: int, options: dict[str, Any]) -> str:
    try:
        CPDSGDM(nn.Linear(2, 1).parameters(), **options)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("options", "sentence"), COMPRESSED, ids=str)
def test_what_cpd_cannot_do_is_refused_on_every_rank(options: dict[str, Any], sentence: str) -> None:
    for message in run_ranks(compressed, 4, "loopback", (options,), timeout=30):
        assert sentence in message


UNKNOWN: list[tuple[dict[Any, Any], str, str]] = [  # options, start of the sentence, hint
    ({"perid": 4}, "perid: ", "got perid = 4 (perhaps period is meant)"),
    ({"topolgy": "ring"}, "topolgy: ", "got topolgy = 'ring' (perhaps topology is meant)"),
    ({"lr": 0.1}, "lr: ", "got lr = 0.1"),
    ({"self": 1}, "self: ", "got self = 1"),
    ({"two words\n": 1}, r"'two words\n': ", r"got 'two words\n' = 1"),
    ({1: 2}, "1: ", "got 1 = 2"),
    ({None: 2}, "None: ", "got None = 2"),
    ({"": 2}, "'': ", "got '' = 2"),
]


@pytest.mark.parametrize(("options", "start", "hint"), UNKNOWN)
def test_an_unknown_option_is_named_with_those_that_exist(options: dict[Any, Any], start: str, hint: str) -> None:
    message = sentence_of(lambda: DecentConfig.load(options))
    assert message.startswith(f"{start}no such option; allowed are period, topology, ") and message.endswith(hint)


FILES: list[tuple[str, str | bytes | None, str]] = [  # name, content, end of the sentence; None: no such file
    ("gone.json", None, "config: allowed is a file that can be read, got {path}, No such file or directory"),
    ("gone.yaml", None, "config: allowed is a file that can be read, got {path}, No such file or directory"),
    ("run.toml", "period = 4", "config: allowed are files that end in .json, .yaml or .yml, got {path}"),
    ("run", "period: 4", "config: allowed are files that end in .json, .yaml or .yml, got {path}"),
    ("a.json", "", "config: allowed is valid JSON, got {name}: expecting value in line 1, column 1"),
    ("a.json", '{"period": 4,}', "config: allowed is valid JSON, got {name}: "),
    ("a.json", "[" * 100_000, "config: allowed is valid JSON, got {name}: a number too long or brackets too deep"),
    ("a.json", '{"period": 1' + "0" * 5000 + "}", "a number too long or brackets too deep"),
    ("a.json", "[1, 2]", "config: allowed is a mapping of options at the top level, got [1, 2] in {name}"),
    ("a.json", b"\xff\xfe", "config: allowed is a UTF-8 text file, got {path}"),
    ("a.json", '{"period": 0}', "got 0 (in {name})"),
    ("a.json", '{"perid": 3}', "got perid = 3 (perhaps period is meant) (in {name})"),
    ("a.yaml", "", "config: allowed is a mapping of options at the top level, got None in {name}"),
    ("a.yaml", "period: [0, 4", "config: allowed is valid YAML, got {name}: expected ',' or ']', but got"),
    ("a.yaml", "a: b: c", "mapping values are not allowed here in line 1, column 5"),
    ("a.yaml", "\x00", "config: allowed is valid YAML, got {name}: a character that YAML does not allow"),
    ("a.yaml", "period: 2020-99-99", "a number or date that cannot be, or brackets too deep"),
    ("a.yaml", "? [1]\n: 2", "found unhashable key in line 1, column 3"),
    ("a.yaml", "period: !!python/name:os.system x", "could not determine a constructor for the tag"),
    ("a.yaml", "just text", "got 'just text' in {name}"),
    ("a.yml", "topology: &a [*a]", "got [[[[[...]]]]] (in {name})"),
    ("a.yml", "1: 2", "got 1 = 2 (in {name})"),
    ("a.yml", "timeout: 1e3", "got '1e3' (in {name})"),  # YAML 1.1 takes 1e3 for text and 1.0e+3 for a number
]


@pytest.mark.parametrize(("name", "content", "end"), FILES)
def test_a_file_that_cannot_be_read_is_named(
    name: str, content: str | bytes | None, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)  # short names in the sentences
    for source in (name, Path(name)):
        message = sentence_of(lambda source=source: DecentConfig.load(source))  # type: ignore[misc]
        assert end.format(name=name, path=repr(name)) in message


def test_a_folder_a_null_byte_and_other_sources(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    assert "Is a directory" in sentence_of(lambda: DecentConfig.load(tmp_path / "folder.json"))
    assert sentence_of(lambda: DecentConfig.load("a\0.json")).startswith("config: allowed is ")
    for source in (3, ["period"], b"a.json", "", True, object):
        message = sentence_of(lambda source=source: DecentConfig.load(source))  # type: ignore[arg-type, misc]
        assert message.startswith("config: allowed is the path of a JSON or YAML file, JSON text that begins with {, ")


def test_yaml_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = write(tmp_path, "a.yaml", "period: 4")
    message = sentence_of(lambda: DecentConfig.load(path))
    assert message.startswith("config: allowed is JSON as long as PyYAML is missing, got ") and "a.yaml" in message
    assert DecentConfig.load(write(tmp_path, "a.json", '{"period": 4}')).period == 4


def test_an_environment_variable_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, start, end in [
        (
            "gone.json",
            f"{VARIABLE}: allowed is a file that can be read, got 'gone.json', ",
            "No such file or directory",
        ),
        ("{", f"{VARIABLE}: allowed is valid JSON, got JSON text: ", "in line 1, column 2"),
        ('{"period": 0}', "period: ", f"got 0 (in {VARIABLE})"),
        ("ring", f"{VARIABLE}: allowed are files that end in .json, .yaml or .yml, got 'ring'", ""),
    ]:
        monkeypatch.setenv(VARIABLE, value)
        message = sentence_of(DecentConfig.load)
        assert message.startswith(start) and message.endswith(end)


@pytest.mark.parametrize(
    ("topology", "shown"),
    [
        ("rng", "rng"),
        ([[0.5, 0.5], [0.5, 0.5]], "2 workers"),
        ([[0.9]], "0.9"),
        ([[float("nan")]], "nan"),
        ([[[1.0]], [[0.5]]], "0.5"),
    ],
)
def test_what_a_topology_means_is_checked_when_the_workers_are_known(topology: Any, shown: str) -> None:
    message = sentence_of(lambda: PDSGDM(nn.Linear(2, 1).parameters(), config={"topology": topology}))
    assert message.startswith("topology: ") and shown in message


def test_an_adam_without_a_warmup_in_any_source() -> None:
    for options in ({}, {"config": {"period": 4}}, {"config": {"warmup_steps": 5}, "warmup_steps": 0}):
        message = sentence_of(lambda options=options: LocalAdamW(nn.Linear(2, 1).parameters(), **options))  # type: ignore[misc]
        assert message.startswith("warmup_steps: got 0, but the second moment is learned in the warm-up; give it ")


# -- nothing but ConfigError, whatever comes ------------------------------------------------------------------------

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["ring", "local"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
) | st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3)  # fmt: skip
keys = st.sampled_from(sorted(DecentConfig.model_fields)) | st.text(max_size=12) | st.integers() | st.none()


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(keys, values, max_size=5))
def test_any_mapping_is_a_configuration_or_one_sentence(options: dict[Any, Any]) -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    try:
        config = DecentConfig.load(options)
    except ConfigError as error:
        refused: str | None = str(error)
    else:
        refused = None
    if refused is not None:
        assert "\n" not in refused and ": " in refused
        with pytest.raises(ConfigError):
            PDSGDM(parameters, config=options)
        return
    assert DecentConfig.load(config.to_dict()) == config
    try:
        PDSGDM(parameters, config=options).step()
    except ConfigError as error:
        refused = str(error)
    # The only field that depends on the number of workers.
    assert refused is None or refused.startswith("topology: ")


contents = (
    st.binary(max_size=40)
    | st.text(max_size=40).map(str.encode)
    | st.dictionaries(st.sampled_from(sorted(DecentConfig.model_fields)), scalars, max_size=3)
    .map(lambda options: json.dumps(options).encode())
)  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(suffix=st.sampled_from([".json", ".yaml"]), content=contents)
def test_any_file_is_a_configuration_or_one_sentence(suffix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"any{suffix}"
    path.write_bytes(content)
    message = ""
    try:
        DecentConfig.load(path)
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


# -- where values come from -------------------------------------------------------------------------------------------


def test_keyword_before_source_before_environment_before_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "run.yaml", "period: 3\nwarmup_steps: 5\n")
    assert DecentConfig.load() == DecentConfig() and DecentConfig().period == 8
    monkeypatch.setenv(VARIABLE, '{"period": 2, "bucket_mb": 1}')
    assert (DecentConfig.load().period, DecentConfig.load().bucket_mb) == (2, 1.0)
    assert DecentConfig.load(period=7) == DecentConfig(period=7, bucket_mb=1)
    # A source stands in place of the variable; it is not laid over it.
    assert DecentConfig.load(path) == DecentConfig(period=3, warmup_steps=5)
    assert DecentConfig.load({}) == DecentConfig.load(DecentConfig()) == DecentConfig()
    assert DecentConfig.load(path, period=9, global_every=None) == DecentConfig(period=9, warmup_steps=5)
    monkeypatch.setenv(VARIABLE, str(path))
    assert DecentConfig.load() == DecentConfig.load(str(path)) == DecentConfig(period=3, warmup_steps=5)
    monkeypatch.setenv(VARIABLE, "")
    assert DecentConfig.load() == DecentConfig()


def test_every_kind_of_source_says_the_same(tmp_path: Path) -> None:
    W = [[0.5, 0.5], [0.5, 0.5]]
    wanted = DecentConfig(period=[(0, 4), (100, 8)], topology=W, timeout=5.0, sync_init=False, global_every=3)
    as_dict = {
        "period": [[0, 4], [100, 8]], "topology": W, "global_every": 3, "timeout": 5.0, "sync_init": False,
    }  # fmt: skip
    assert wanted.to_dict() == as_dict
    text = json.dumps(as_dict)
    yaml = (
        "period: [[0, 4], [100, 8]]\ntopology:\n- [0.5, 0.5]\n- [0.5, 0.5]\nglobal_every: 3\ntimeout: 5\nsync_init: no"
    )
    sources = [as_dict, wanted, text, f"  {text}", write(tmp_path, "a.json", text), write(tmp_path, "a.yml", yaml)]
    for source in [*sources, str(tmp_path / "a.json")]:
        config = DecentConfig.load(source)
        assert config == wanted and config.model_fields_set == wanted.model_fields_set
    assert pickle.loads(pickle.dumps(wanted)) == wanted


def test_numbers_of_numpy_and_matrices_of_any_library() -> None:
    config = DecentConfig(period=np.int64(4), outer_momentum=np.float32(0.5), sync_init=np.bool_(False), timeout=3)
    assert config == DecentConfig(period=4, outer_momentum=0.5, sync_init=False, timeout=3.0)
    assert type(config.period) is int and type(config.timeout) is float
    assert DecentConfig(period=[[np.int32(0), np.int32(2)]]).period == [(0, 2)]
    W = np.full((3, 3), 1 / 3)
    for matrix in (W, torch.tensor(W), W.tolist(), tuple(W), [list(row) for row in W]):
        config = DecentConfig(topology=matrix)
        assert config.topology == W.tolist() and config == DecentConfig(**config.to_dict())
    assert DecentConfig(topology=[W, torch.tensor(W)]).topology == [W.tolist()] * 2
    assert DecentConfig(topology=[W, "ring"]).topology == [W.tolist(), "ring"]


def test_objects_pass_and_a_topology_is_saved_as_its_matrices() -> None:
    graph = nx.cycle_graph(4)
    assert DecentConfig(topology=graph).topology is graph and DecentConfig(topology=[graph]).topology == [graph]
    topology = make_topology("one-peer-exponential", 4)
    config = DecentConfig(topology=topology)
    assert config.topology is topology
    saved = DecentConfig(**json.loads(json.dumps(config.to_dict())))
    again = make_topology(saved.topology, 4)
    assert all((again.matrix(r) == topology.matrix(r)).all() for r in range(4))
    assert DecentConfig(**saved.to_dict()) == saved


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DecentConfig().period = 3  # type: ignore[misc]


def test_the_schema_has_every_field_and_says_what_it_is() -> None:
    schema = DecentConfig.json_schema()
    assert schema["properties"].keys() == DecentConfig.model_fields.keys()
    assert schema["additionalProperties"] is False and "required" not in schema
    assert all(len(p["description"]) > 20 and "default" in p for p in schema["properties"].values())
    assert "\n" not in schema["description"]
    json.dumps(schema, allow_nan=False)


# -- every entry point ------------------------------------------------------------------------------------------------


def entry_points(config: Any, **options: Any) -> dict[str, DecentConfig]:
    """The configuration that each of them ends up with."""

    def linear() -> nn.Linear:
        return nn.Linear(3, 2)

    def sgd(model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model = linear()
    return {
        "Decentralized": Decentralized(sgd(linear()), config=config, **options).rounds.config,
        "PDSGDM": PDSGDM(linear().parameters(), config=config, **options).rounds.config,
        "LocalAdamW": LocalAdamW(linear().parameters(), config=config, **options).rounds.config,
        "decentralize": decentralize(model, sgd(model), config=config, **options).rounds.config,
        "GossipState": GossipState(sgd(model), config=config, **options).rounds.config,
    }


def check_entry_points(rank: int, config: Any, workers: int) -> list[int]:
    found = entry_points(config, bucket_mb=2)
    wanted = {"period": 3, "topology": "complete", "warmup_steps": 2, "bucket_mb": 2.0}
    for name, resolved in found.items():
        momentum = 0.5 if name == "LocalAdamW" else 0.0  # its own default, which the config does not mention
        assert resolved == DecentConfig(outer_momentum=momentum, **wanted), name
    model = nn.Linear(3, 2)
    optimizer = PDSGDM(model.parameters(), config=config)
    for _ in range(8):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert optimizer.param_groups[0]["period"] == 3
    return [record.step for record in optimizer.monitor.records if record.kind == "gossip"]


CONFIG = {"period": 3, "topology": "complete", "warmup_steps": 2}


@pytest.mark.parametrize("kind", ["dict", "file", "object"])
def test_every_entry_point_takes_a_config(kind: str, tmp_path: Path) -> None:
    sources = {"dict": CONFIG, "object": DecentConfig(**CONFIG)}
    source = sources.get(kind, write(tmp_path, "a.yaml", json.dumps(CONFIG)))
    assert check_entry_points(0, source, 1) == []
    assert run_ranks(check_entry_points, 2, "loopback", (source, 2)) == [[3, 6]] * 2


def test_every_entry_point_reads_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(write(tmp_path, "a.json", json.dumps(CONFIG))))
    assert check_entry_points(0, None, 1) == []
    assert run_ranks(check_entry_points, 2, "loopback", (None, 2)) == [[3, 6]] * 2
    monkeypatch.setenv(VARIABLE, '{"period": 5}')
    assert all(c.period == 3 for c in entry_points(CONFIG).values()), "an explicit config stands in its place"


def test_a_default_of_a_class_is_weaker_than_the_config_and_an_argument_stronger() -> None:
    def momentum(**options: Any) -> float:
        optimizer = LocalAdamW(nn.Linear(2, 1).parameters(), **{"warmup_steps": 1, **options})
        assert optimizer.param_groups[0]["outer_momentum"] == optimizer.rounds.config.outer_momentum
        return optimizer.rounds.config.outer_momentum

    assert momentum() == momentum(config={"period": 3}) == momentum(config=DecentConfig(period=3)) == 0.5
    assert momentum(config={"outer_momentum": 0.0}) == momentum(config=DecentConfig(outer_momentum=0.0)) == 0.0
    assert momentum(config={"outer_momentum": 0.2}, outer_momentum=0.7) == 0.7
    optimizer = PDSGDM(nn.Linear(2, 1).parameters(), config={"period": 3, "topology": "star"}, topology="ring")
    assert (optimizer.rounds.config.period, optimizer.rounds.config.topology) == (3, "ring")


def test_an_optimizer_that_is_decentralised_already_takes_no_config() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"options: \['config', 'period'\] belong to the optimizer"):
        decentralize(model, PDSGDM(model.parameters()), config={}, period=3)


def test_a_copy_keeps_its_configuration_when_file_and_variable_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "a.json", '{"period": 3}')
    monkeypatch.setenv(VARIABLE, '{"period": 4}')
    optimizers = [PDSGDM(nn.Linear(2, 1).parameters(), config=path), PDSGDM(nn.Linear(2, 1).parameters())]
    saved = pickle.dumps(optimizers)
    path.unlink()
    monkeypatch.delenv(VARIABLE)
    assert [optimizer.rounds.config.period for optimizer in pickle.loads(saved)] == [3, 4]


def refused_on_one_rank(rank: int, folder: str) -> tuple[str, str]:
    config = Path(folder) / f"{rank}.json"
    with pytest.raises(ConfigError) as error:
        PDSGDM(nn.Linear(2, 1).parameters(), config=config)
    return type(error.value).__name__, str(error.value)


def test_a_file_that_one_rank_cannot_use_stops_all_of_them(ranks: RankPool, tmp_path: Path) -> None:
    write(tmp_path, "0.json", '{"timeout": 50}')
    for run in (lambda: run_ranks(refused_on_one_rank, 2, "loopback", (str(tmp_path),)),
                lambda: ranks.run(refused_on_one_rank, 2, (str(tmp_path),))):  # fmt: skip
        (kind, message), (own_kind, own_message) = run()
        assert kind == Disagreement.__name__ and own_kind == ConfigError.__name__
        assert message == f"rank 1 refused its configuration: ConfigError: {own_message}"
        assert "1.json" in own_message and "No such file" in own_message
    write(tmp_path, "1.json", '{"timeout": 50, "period": 2}')
    (_, message), _ = ranks.run(refused_on_one_rank, 2, (str(tmp_path),))
    assert message == "period: rank 0 has 8, rank 1 has 2; every rank needs the same"


# -- the command line -------------------------------------------------------------------------------------------------


def test_the_command_prints_the_schema() -> None:
    result = runner.invoke(app, ["schema"])
    assert result.exit_code == 0 and json.loads(result.output) == DecentConfig.json_schema()


def test_the_command_checks_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "period: 4\ntopology: hypercube\n")
    result = runner.invoke(app, ["check", str(path), "--size", "4"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == DecentConfig(period=4, topology="hypercube").model_dump()
    result = runner.invoke(app, ["check", str(path), "--size", "6"])
    assert result.exit_code == 2 and result.stderr.startswith("decent-opt: topology: ")
    result = runner.invoke(app, ["check", str(path)])
    assert result.exit_code == 0 and "--size N" in result.stderr and json.loads(result.stdout)["period"] == 4
    write(tmp_path, "a.yaml", "period: 0")
    result = runner.invoke(app, ["check", str(path)])
    assert result.exit_code == 2 and result.stderr.startswith("decent-opt: period: allowed is ")
    assert str(path) in result.stderr and not result.stdout
