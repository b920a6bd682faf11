"""The quantization modes: their grammar, their table of facts, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_core import _modes
from policy_core._modes import Mode, Scheme, parse_mode, register_scheme, scheme_names

WITH_KERNELS = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
WITHOUT_KERNELS = ("int4", "gptq", "awq", "ternary")

blocks = st.integers(1, 10**9 - 1) | st.just(-1)
canonical_modes = st.one_of(
    st.sampled_from((*WITH_KERNELS, "int4", "ternary")),
    blocks.map("int4/{}".format),
    st.builds("gptq/{}/{}".format, st.sampled_from((2, 3, 4, 8)), blocks),
    blocks.map("awq/4/{}".format),
)


def test_all_schemes_are_registered():
    """The schemes that the design names are there, and no others."""
    assert scheme_names() == (*WITH_KERNELS, *WITHOUT_KERNELS)


@given(canonical_modes)
def test_parse_and_str_are_inverses(text):
    """A mode's text is read and written back the same."""
    mode = parse_mode(text)
    assert str(mode) == text
    assert parse_mode(str(mode)) == mode


@given(st.text(st.characters(codec="utf-8"), max_size=12) | st.text("int4/-8None gptqaw_from1 "))
def test_every_text_is_a_mode_or_refused(text):
    """Any text either is a mode whose canonical form is stable, or raises ValueError."""
    try:
        mode = parse_mode(text)
    except ValueError:
        return
    assert parse_mode(str(mode)) == mode


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_schemes_with_kernels_say_their_codes(name):
    """A scheme that can be computed names the dtype of its weight codes."""
    assert parse_mode(name).scheme.weight_codes in ("int8", "float8_e4m3fn")


@pytest.mark.parametrize("text", ["int4", "int4/128", "gptq/4/128", "awq/4/128", "ternary"])
def test_schemes_without_kernels_say_so(text):
    """A scheme that nothing computes yet has no dtype of codes."""
    assert parse_mode(text).scheme.weight_codes is None


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        pytest.param("int4/None", "int4/-1", id="none-is-a-whole-channel"),
        pytest.param("gptq/4/None", "gptq/4/-1", id="none-for-a-group"),
        pytest.param("int4/0128", "int4/128", id="leading-zero"),
    ],
)
def test_old_forms_have_one_canonical_text(text, canonical):
    """Another spelling of a mode is the same mode."""
    assert str(parse_mode(text)) == canonical
    assert parse_mode(text) == parse_mode(canonical)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        pytest.param("int7", ValueError, "Invalid quantization mode.", id="unknown"),
        pytest.param("", ValueError, "Invalid quantization mode.", id="empty"),
        pytest.param("INT8", ValueError, "Received: mode='INT8'", id="case"),
        pytest.param("int8/weight-only", ValueError, "Did you mean 'int8/weight_only'?", id="typo"),
        pytest.param("int8/128", ValueError, "Invalid quantization mode.", id="no-parameters"),
        pytest.param("ternary/2", ValueError, "Invalid quantization mode.", id="ternary-parameter"),
        pytest.param("int4/", ValueError, "Invalid mode 'int4/'", id="empty-parameter"),
        pytest.param("int4/0", ValueError, "must be -1 (a whole channel) or positive", id="zero"),
        pytest.param("int4/-2", ValueError, "not -2", id="negative"),
        pytest.param("int4/1.5", ValueError, "must be an integer", id="fraction"),
        pytest.param("int4/+8", ValueError, "must be an integer", id="plus"),
        pytest.param("int4/ 8", ValueError, "must be an integer", id="space"),
        pytest.param("int4/1_000", ValueError, "must be an integer", id="underscore"),
        pytest.param("int4/\u0661", ValueError, "must be an integer", id="arabic-digit"),
        pytest.param(f"int4/{'9' * 5000}", ValueError, "at most nine digits", id="huge"),
        pytest.param("int4/8/8", ValueError, "with 1 integers", id="one-too-many"),
        pytest.param("gptq", ValueError, "'gptq/<weight_bits>/<group_size>'", id="gptq-bare"),
        pytest.param("gptq/4", ValueError, "with 2 integers", id="gptq-one-missing"),
        pytest.param("gptq/5/128", ValueError, "2, 3, 4 or 8, not 5", id="gptq-bits"),
        pytest.param("awq/8/128", ValueError, "only supports 4-bit", id="awq-bits"),
        pytest.param("awq/4/0", ValueError, "Invalid mode 'awq/4/0'", id="awq-group"),
        pytest.param(8, TypeError, "'mode' must be a string", id="a-number"),
        pytest.param(None, TypeError, "Received: mode=None", id="none"),
        pytest.param(b"int8", TypeError, "Received: mode=b'int8'", id="bytes"),
    ],
)
def test_parse_mode_refuses(text, error, message):
    """A mode that is none is refused with its reason."""
    with pytest.raises(error, match=re.escape(message)):
        parse_mode(text)


def test_unknown_modes_are_answered_with_the_known_ones():
    """The error for an unknown mode lists every form that exists."""
    with pytest.raises(ValueError, match="Expected one of") as caught:
        parse_mode("int9")
    for name in scheme_names():
        assert f"'{name}" in str(caught.value)


def test_a_registered_scheme_can_be_named(monkeypatch):
    """A new mode is one registered object; nothing else has to know it."""
    monkeypatch.setattr(_modes, "_SCHEMES", dict(_modes._SCHEMES))
    scheme = register_scheme(Scheme(name="int2", parameters=("block_size",)))
    assert parse_mode("int2/64") == Mode(scheme, (64,))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("int8", "registered already", id="taken"),
        pytest.param("int8_from_above", "must not hold '_from_'", id="separator"),
    ],
)
def test_register_scheme_refuses(name, message):
    """A name that is taken or that the grammar cannot hold is refused, and nothing changes."""
    before = scheme_names()
    with pytest.raises(ValueError, match=message):
        register_scheme(Scheme(name=name))
    assert scheme_names() == before
