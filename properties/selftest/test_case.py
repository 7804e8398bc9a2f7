"""The text of a case: it is read back as it was written, and nothing in it is ever evaluated."""

from __future__ import annotations

import dataclasses
import math
import pickle
import sys
import types
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import bent_subjects
import pytest
from bent_subjects import Sizes, bent, right
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

import tpverify as tpv
from tpverify.case import CALLS, GROUPS, LAYOUTS, VALUES, parse_case, short_repr, subject_of
from tpverify.lookup import addressed, builtin_subjects, config_types, load_subject, read_case
from tpverify.strategies import ALL_WORLD_SIZES, cases


class Norm(Enum):
    """An option."""

    PRE = "pre"
    POST = "post"


class Level(IntEnum):
    """Another."""

    LOW = 0


@dataclass(frozen=True)
class Inner:
    """A nested config."""

    size: int = 1
    norm: Norm = Norm.PRE


@dataclass(frozen=True)
class Outer:
    """Everything that a config may hold."""

    inner: Inner = field(default_factory=Inner)
    many: tuple[Any, ...] = ()
    rate: float = 0.0
    name: str = ""
    level: Level = Level.LOW
    options: dict[str, Any] = field(default_factory=dict)
    hidden: int = field(default=3, init=False)


@dataclass(frozen=True)
class Refusing:
    """A config that refuses its arguments."""

    size: int

    def __post_init__(self) -> None:
        raise ValueError(f"Expected another size but got size={self.size}")


TYPES = {"Refusing": Refusing, "Outer": Outer, "Inner": Inner, "Norm": Norm, "Level": Level, "Sizes": Sizes, "Config": tpv.Config}
QUICK = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))


@pytest.mark.parametrize("name", builtin_subjects())
def test_cases_of_built_in_subjects_are_read_back(name: str) -> None:
    subject = builtin_subjects()[name]

    @QUICK
    @given(cases(subject, ALL_WORLD_SIZES))
    def back(case: tpv.Case) -> None:
        assert read_case(repr(case)) == (subject, case)
        assert pickle.loads(pickle.dumps(case)) == case

    back()


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.sampled_from(Norm),
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)
outers = st.builds(
    Outer,
    inner=st.builds(Inner, size=st.integers(), norm=st.sampled_from(Norm)),
    many=st.tuples(plain, plain),
    rate=st.floats(allow_nan=False),
    name=st.text(),
    options=st.dictionaries(st.text(max_size=2), plain, max_size=2),
)


@QUICK
@given(
    outers,
    st.sampled_from(VALUES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(GROUPS),
    st.sampled_from(CALLS),
    st.integers(1, 9),
    st.integers(0, 2**32),
)
def test_plain_values_enums_and_nested_configs_are_read_back(
    config: Outer, values: str, layout: str, groups: str, calls: str, size: int, seed: int
) -> None:
    case = tpv.Case("a:b", config, size, seed, values, layout, groups, calls)
    assert parse_case(repr(case), TYPES) == case
    assert subject_of(repr(case)) == "a:b"


def test_what_stands_at_its_default_is_left_out_and_what_only_looks_like_it_is_not() -> None:
    assert short_repr(Outer()) == "Outer(inner=Inner(), options={})"  # factories have no default to compare with
    assert short_repr(Inner(norm=Norm.POST)) == "Inner(norm=Norm.POST)"
    assert short_repr(Inner(size=True)) == "Inner(size=True)"
    assert repr(tpv.Case("a", Sizes(), 2)) == "Case('a', Sizes(), world_size=2)"
    assert "rate=nan" in repr(tpv.Case("a", Outer(rate=math.nan), 2))
    assert math.isnan(parse_case("Case('a', Outer(rate=nan), world_size=2)", TYPES).config.rate)


@pytest.mark.parametrize(
    "text",
    [
        "Case('x', __import__('os').system('true'), world_size=2)",
        "Case('x', __import__('os'), world_size=2)",
        "Case('x', Sizes(seq=open('f')), world_size=2)",
        "Case('x', Sizes(seq=[].__class__), world_size=2)",
        "Case('x', Sizes(seq=Norm.__class__), world_size=2)",
        "Case('x', Sizes(seq=Norm.mro), world_size=2)",
        "Case('x', Sizes.__init__(1), world_size=2)",
        "Case('x', (lambda: 1)(), world_size=2)",
        "Case('x', [i for i in (1,)], world_size=2)",
        "Case('x', Sizes(seq=1 if True else 2), world_size=2)",
        "Case('x', Sizes(seq=f'{1}'), world_size=2)",
        "Case('x', Sizes(seq=(y := 1)), world_size=2)",
        "Case('x', Sizes(**{'seq': 1}), world_size=2, **{'layout': 'x'})",
        "Case('x', {**{}}, world_size=2)",
        "Case('x', Config(**{'seq': 1}), world_size=2)",
        "Case('x', *(1,), world_size=2)",
        "Case('x', Sizes(seq=y), world_size=2)",
        "Case('x', Size(), world_size=2)",
        "Case('x', Sizes(sequence=1), world_size=2)",
        "Case('x', Sizes(), 2, 3, world_size=2)",
        "Case('x', Sizes(), world_size=0)",
        "Case('x', Sizes(), world_size=2, values='odd')",
        "Case('x', Sizes(), world_size=2, layout='odd')",
        "Case('x', Sizes(), world_size=2, groups='odd')",
        "Case('x', Sizes(), world_size=2, calls='thrice')",
        "Case('x', Sizes(), world_size='2')",
        "Case('x', Sizes(), world_size=2, seed='a')",
        "Case('x', Refusing(size=3), world_size=2)",
        "Case('x', {[]: 1}, world_size=2)",
        "Case('x', {{}}, world_size=2)",
        "Case('x', " + "-" * 20000 + "1, world_size=2)",
        "Case('x\0', Sizes(), world_size=2)",
        "Case('x')",
        "Case(",
        "Sizes()",
        "import os",
        "1; 2",
        "",
        "(" * 300,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(tpv.CaseError):
        parse_case(text, TYPES)


@pytest.mark.parametrize("text", ["", "Case(", "Case()", "Case(1)", "Sizes('x')", "Case(subject=1)", "\0", "-" * 20000 + "1"])
def test_a_text_without_a_subject_is_refused(text: str) -> None:
    with pytest.raises(tpv.CaseError):
        subject_of(text)


def test_a_config_made_of_fields_is_read_back() -> None:
    strategy = tpv.configs(seq=st.integers(1, 3), norm=st.sampled_from(Norm), sizes=(1, 2), values=3)
    config = find(strategy(2), lambda config: config.seq == 2, settings=settings(database=None))
    assert (config.seq, config.norm, config.sizes, config.values) == (2, Norm.PRE, (1, 2), 3)
    case = tpv.Case("a", config, 2)
    assert repr(case) == "Case('a', Config(seq=2, norm=Norm.PRE, sizes=(1, 2), values=3), world_size=2)"
    assert parse_case(repr(case), TYPES) == case
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError, match="Expected one of seq, norm, sizes, values but got 'sequence'"):
        _ = config.sequence
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seq = 3  # type: ignore[attr-defined]


def user_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> types.ModuleType:
    """An imported module of the user's."""
    module = types.ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_a_subject_is_addressed_by_the_module_that_can_be_imported() -> None:
    assert addressed(right).name == "bent_subjects:right"
    assert load_subject("bent_subjects:right") == addressed(right)
    assert addressed(builtin_subjects()["gpt"]).name == "gpt"
    local = bent()
    assert addressed(local) is local


def test_a_named_copy_in_another_module_is_found_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = bent()
    user_module(monkeypatch, "my_models", mine=mine)
    assert addressed(mine).name == "my_models:mine"
    assert read_case("Case('my_models:mine', Sizes(seq=2), world_size=2)")[1] == tpv.Case("my_models:mine", Sizes(2), 2)


def test_config_classes_are_found_where_the_user_put_them(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Here:
        inner: Inner = Inner()

    Here.__module__ = "my_configs"
    user_module(monkeypatch, "my_configs", Here=Here, Inner=Inner, Norm=Norm)
    known = config_types(bent(configs=st.builds(Here)))
    assert known["Sizes"] is bent_subjects.Sizes  # the reference's module
    assert "Here" not in known
    mine = bent(name="my_models:mine", configs=st.builds(Here))
    user_module(monkeypatch, "my_models", mine=mine, Here=Here)
    known = config_types(mine)
    assert (known["Here"], known["Inner"], known["Norm"], known["Config"]) == (Here, Inner, Norm, tpv.Config)
    case = tpv.Case("my_models:mine", Here(Inner(2, Norm.POST)), 2)
    assert read_case(repr(case))[1] == case
