"""Path patterns: the same answers as `re.fullmatch`, in bounded time, by either way of matching."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policy_core as pc
from policy_core import _patterns
from policy_core._patterns import MAX_PATH, MAX_PATTERN, compile_pattern

# What every backend's look-up must answer for a rule and a path.
MATCHES = [
    pytest.param("attention/query", "attention/query", True, id="itself"),
    pytest.param("attention/query", "attention/query_norm", False, id="longer-name"),
    pytest.param("attention/query", "attention/query/sub", False, id="child"),
    pytest.param("attention/query", "my/attention/query", False, id="below-another"),
    pytest.param("conv2d.*kernel", "my_model/conv2d_1/kernel", False, id="in-the-middle"),
    pytest.param("conv2d.*kernel", "conv2d_1/kernel", True, id="whole"),
    pytest.param("encoder/.*", "encoder/layers/0/linear1", True, id="all-below"),
    pytest.param("encoder/.*", "encoder", False, id="not-the-container"),
    pytest.param("encoder/[^/]*", "encoder/layers/0", False, id="one-part"),
    pytest.param(".*attn.*", "encoder/0/attn/query", True, id="contains"),
    pytest.param("(?!.*attn).*", "encoder/0/attn/query", False, id="contains-not"),
    pytest.param("(?!.*attn).*", "encoder/0/mlp", True, id="contains-not-other"),
    pytest.param(r"layers/\d+/mlp", "layers/12/mlp", True, id="digits"),
    pytest.param(r"layers/[02468]/.*", "layers/3/mlp", False, id="set"),
    pytest.param("a|ab", "ab", True, id="longer-alternative"),
    pytest.param("", "", True, id="empty"),
    pytest.param(".*", "", True, id="empty-path"),
    pytest.param("(?i)ENCODER", "encoder", True, id="flag"),
    pytest.param(r"(\w)\1", "aa", True, id="back-reference"),
]


@pytest.mark.parametrize(("pattern", "path", "matches"), MATCHES)
def test_matches(pattern, path, matches):
    """A pattern matches a whole path or does not match."""
    assert compile_pattern(pattern)(path) is matches
    assert (re.fullmatch(pattern, path) is not None) is matches


@pytest.fixture(scope="module")
def followed():
    """A function like compile_pattern, whose patterns are all matched by sets of positions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_patterns, "_MAX_STEPS", -1)
        yield compile_pattern.__wrapped__


_atoms = st.sampled_from(
    [
        *("a", "b", "/", "_", "1", ".", "[ab]", "[^a]", "[a-c1]", r"\w", r"\W", r"\d", r"\D"),
        *(r"\s", r"\S", "^", "$", r"\b", r"\B", r"\A", r"\Z", "(?!)", "é", r"[^\w/]", "", r"\."),
    ]
)
_repeats = st.sampled_from(
    ["*", "+", "?", "*?", "+?", "??", "{2}", "{0}", "{1,3}", "{2,}", "{,2}?"]
)
trees = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, _repeats).map(lambda pair: f"({pair[0]}){pair[1]}"),
        st.tuples(st.sampled_from(["(?=", "(?!"]), inner).map(lambda pair: f"{pair[0]}{pair[1]})"),
    ),
    max_leaves=8,
)
texts = st.text(st.sampled_from("ab/_1.é -\n"), max_size=7)


@settings(max_examples=500)
@given(trees, st.lists(texts, min_size=1, max_size=6))
def test_matching_is_that_of_re(pattern, paths):
    """The public function answers as re.fullmatch does."""
    matches = compile_pattern(pattern)
    for path in paths:
        assert matches(path) is (re.fullmatch(pattern, path) is not None)


@settings(max_examples=500)
@given(trees, st.lists(texts, min_size=1, max_size=6))
def test_following_positions_is_that_of_re(followed, pattern, paths):
    """Matching by sets of positions answers as re.fullmatch does."""
    matches = followed(pattern)
    for path in paths:
        assert matches(path) is (re.fullmatch(pattern, path) is not None)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        pytest.param("(a+)+$", "a" * 40 + "!", id="nested-plus"),
        pytest.param("(a|a)*$", "a" * 40 + "!", id="ambiguous"),
        pytest.param("(a?){25}a{25}", "a" * 24, id="optional-counted"),
        pytest.param("(.*)*x", "a" * 40, id="nested-star"),
        pytest.param(".*.*.*.*.*.*x", "a" * 40, id="six-stars"),
        pytest.param("(((a|aa)*)*)*b", "a" * 40, id="thrice-nested"),
        pytest.param("((a{1,9}){1,9}){1,9}b", "a" * 40, id="nested-counted"),
        pytest.param(".*.*a{400}b", "a" * 1000, id="long-tail"),
        pytest.param(f".*.*{'a' * 500}b", "a" * 1000, id="long-literal"),
        pytest.param(r"(?:(?:(?:\b){999}){999}){999}", "a" * 40, id="nothing-a-billion-times"),
        pytest.param("(?:(?:(?:a|){999}){999}){999}b", "a" * 999, id="empty-branch"),
        pytest.param("(?:(?!(?:a?b*)*c)(?:a*b?)*)*d", "ab" * 500, id="nested-look-ahead"),
        pytest.param("a{0,4294967294}b", "a" * 1000, id="huge-count"),
        pytest.param("(?:a|b|[ab]|ab|ba)*?c", "ab" * 500, id="lazy"),
        pytest.param("(?i)(?:A*){5}b", "a" * 40, id="flags"),
        pytest.param("(?i).*.*.*.*b", "a" * 999, id="flags-on-a-long-path"),
        pytest.param(r"(a*)(a*)(a*)(a*)\1\2\3b", "a" * 300, id="back-references"),
        pytest.param("(" * 90 + "a*" + ")*" * 90 + "b", "a" * 40, id="ninety-deep"),
        pytest.param("(?:.*,){11}P", ",a" * 300, id="fields"),
    ],
)
def test_hostile_patterns_are_answered_or_refused_in_bounded_time(pattern, path):
    """A pattern made to be slow is answered, or refused by a ValueError, far from exponentially.

    Each takes under 10 ms of a quiet core; the bound leaves room for a busy one. What is bounded
    is the thread's own time, and the patterns would take minutes to ages without the bound.
    """

    refusals = []

    def seconds():
        start = time.thread_time()
        try:
            compile_pattern(pattern)(path)
        except ValueError as error:
            refusals.append(str(error))
        return time.thread_time() - start

    seconds()  # the first time compiles
    assert min(seconds() for _ in range(3)) < 0.1
    assert all("could take unbounded time" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        pytest.param("[", "is not a valid pattern: unterminated character set", id="set"),
        pytest.param("(a", "missing ), unterminated subpattern", id="group"),
        pytest.param("*a", "nothing to repeat", id="repeat"),
        pytest.param("a{2,1}", "min repeat greater than max repeat", id="order"),
        pytest.param("a{99999999999}", "is not a valid pattern", id="count"),
        pytest.param(r"\1", "invalid group reference", id="reference"),
        pytest.param("a(?i)", "global flags not at the start", id="flag"),
        pytest.param("(?P<n>a)(?P<n>b)", "redefinition of group name", id="group-name"),
        pytest.param("a" * (MAX_PATTERN + 1), "A pattern may have 1000 characters", id="long"),
        pytest.param("(a*)*\\1", "because of its groupref", id="repeat-and-reference"),
        pytest.param("(?<=a)(a*)*", "because of its look-behind", id="repeat-and-look-behind"),
        pytest.param("(?i)(a*)*", "because of its flags", id="repeat-and-flags"),
        pytest.param("((?i:a)*)*", "because of its inline flags", id="repeat-and-inline-flags"),
        pytest.param("(" * 101 + ")" * 101, "because of its nesting", id="deep"),
        pytest.param("(" * 450 + ")" * 450, "because of its nesting", id="deepest"),
        pytest.param("((a{9}|b)*c)*+{0}[", "not a valid pattern", id="braces-in-the-message"),
    ],
)
def test_bad_patterns_are_refused_when_set(pattern, message):
    """A malformed or unbounded pattern is refused when it becomes a rule; the map stays."""
    policies = pc.DTypePolicyMap("float32", {"a": "bfloat16"})
    with pytest.raises(ValueError, match=re.escape(message)):
        policies[pattern] = "float16"
    assert list(policies) == ["a"]


def test_long_paths_are_refused():
    """A path of more than 1,000 characters is refused; one of 1,000 is matched."""
    matches = compile_pattern("a*")
    assert matches("a" * MAX_PATH)
    with pytest.raises(ValueError, match="A path may have 1000 characters"):
        matches("a" * (MAX_PATH + 1))


def test_ordinary_patterns_on_long_paths():
    """Patterns with two wildcards are answered on the longest paths too."""
    path = f"{'encoder/' * 60}attn/{'layer/' * 80}0"
    assert len(path) > 900
    assert compile_pattern(".*attn.*")(path)
    assert not compile_pattern("(?!.*attn).*")(path)
    assert not compile_pattern(".*attn.*kernel")(path)


@pytest.mark.parametrize("pattern", ["(a|b)+c", "a*b*c"])
def test_one_pattern_serves_many_threads(pattern):
    """One compiled pattern gives each of eight threads its own right answers."""
    matches = compile_pattern(pattern)
    paths = ["a" * n + "b" * (n % 3) + "c" * (n % 2) for n in range(60)]
    expected = [re.fullmatch(pattern, path) is not None for path in paths]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: [matches(path) for path in paths], range(64)))
    assert answers == [expected] * 64
