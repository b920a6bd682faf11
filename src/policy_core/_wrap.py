"""`wrap`, `unwrap`, `freeze`: decide and check everything, then change the model."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from ._backend import Backend, Site, Step, Wrapping, model_backend
from ._dtypes import DTYPES, did_you_mean, shorten
from ._patterns import compile_pattern
from ._plan import Plan, plan
from ._policies import DTypePolicy
from ._policy_map import DTypePolicyMap
from ._serialization import get
from .errors import AlreadyWrappedError, LayerError, UnmatchedRuleError

OnUnmatched = Literal["error", "warn", "ignore"]
OnWrapped = Literal["error", "keep", "replace"]


def wrap(
    model: Any,
    policy: Any = None,
    *,
    on_unmatched: OnUnmatched = "error",
    on_wrapped: OnWrapped = "error",
) -> Any:
    """Gives a model whose layers follow a dtype policy.

    Every decision is made and checked before the first layer changes: when this raises, the model
    is as it was. The float weight of a layer is freed before the next layer is quantized.

    Args:
        model: A model, or one layer, of any framework that has a backend.
        policy: A policy's name, a policy, a map, a dict from paths or patterns to policies, or
            None for the default policy.
        on_unmatched: What to do about a rule that matches no layer: raise, warn, or nothing.
        on_wrapped: What to do about layers that have another policy already: raise, keep theirs,
            or replace it.

    Returns:
        The model: the same object where the framework's models are mutable.

    Raises:
        TypeError: No backend serves such a model.
        ValueError: The policy cannot be understood; the model has no layers; an option is unknown.
        UnmatchedRuleError: A rule matches no layer.
        AlreadyWrappedError: Layers have another policy.
        LayerError: A layer cannot take its policy: it says which, and why.
        NoKernelError: The mode has no kernel yet.
    """
    _check_option("on_unmatched", on_unmatched, get_args(OnUnmatched))
    _check_option("on_wrapped", on_wrapped, get_args(OnWrapped))
    adapter = model_backend(model)
    sites = walk(adapter, model)
    # A framework with policy maps of its own may name layers in them in its own way.
    rules_of = getattr(adapter, "rules_of", None)
    policies = as_map(policy if rules_of is None else rules_of(policy, sites))
    _check_rules(policies, sites, on_unmatched)
    plans = {id(site): _plan_of(site, _policy_of(site, policies)) for site in sites}
    changing = _changing(sites, plans, on_wrapped)
    _check_ties(adapter, sites, plans, changing)
    seen: set[object] = set()
    steps = []
    for site in changing:
        before = float_bytes(adapter, site, seen)
        steps.append(_checked_step(adapter, site, plans[id(site)], before))
    return adapter.apply(model, steps) if steps else model


def unwrap(model: Any) -> Any:
    """Gives a model back to float layers, in the dtypes that they had before `wrap`.

    Weights of which only codes are left are dequantized.

    Args:
        model: A model that `wrap` gave, or any other, which stays as it is.

    Raises:
        TypeError: No backend serves such a model.
    """
    adapter = model_backend(model)
    return adapter.unwrap(model, [site for site in walk(adapter, model) if site.wrapping])


def freeze(model: Any) -> Any:
    """Gives a model whose trainable quantized layers keep only codes, for inference.

    Its answers are those that it gave outside training. Other layers stay as they are.

    Args:
        model: A model that `wrap` gave.

    Raises:
        TypeError: No backend serves such a model.
        LayerError: A weight holds a NaN or an infinity.
    """
    adapter = model_backend(model)
    steps = []
    for site in walk(adapter, model):
        if site.wrapping is not None and site.wrapping.plan.trainable:
            frozen = plan(site.wrapping.plan.asked, site.spec, frozen=True)
            steps.append(_checked_step(adapter, site, frozen, site.wrapping.bytes_before))
    return adapter.apply(model, steps) if steps else model


def as_map(policy: Any) -> DTypePolicyMap:
    """Gives the map that `wrap`'s policy argument means."""
    if isinstance(policy, dict) and "class_name" not in policy:
        return DTypePolicyMap(None, policy)
    found = get(policy)
    return found if isinstance(found, DTypePolicyMap) else DTypePolicyMap(found)


def walk(adapter: Backend, model: Any) -> list[Site]:
    """Gives the layers of a model; ValueError if it has none."""
    sites = adapter.walk(model)
    if not sites:
        raise ValueError(f"The model has no layers: {shorten(model)}")
    return sites


def float_bytes(adapter: Backend, site: Site, seen: set[object]) -> int:
    """Gives what a plain layer's tensors take, without those whose storage was seen before."""
    if site.wrapping is not None:
        return site.wrapping.bytes_before
    total = 0
    for tensor in site.spec.tensors:
        key = adapter.storage_key(site.tensors[tensor.name])
        if key not in seen:
            seen.add(key)
            size = 1
            for n in tensor.shape:
                size *= n
            total += size * DTYPES[tensor.dtype].bits // 8
    return total


def _check_option(name: str, value: object, choices: Iterable[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}. Received: {name}={value!r}")


def _check_rules(policies: DTypePolicyMap, sites: list[Site], on_unmatched: OnUnmatched) -> None:
    paths = [path for site in sites for path in site.paths]
    names = {*paths, *(alias for site in sites for alias in site.aliases)}
    for key in policies if on_unmatched != "ignore" else ():
        matches = compile_pattern(key)
        if key in names or any(matches(path) for path in paths):
            continue
        message = f"Rule {key!r} matches no layer{_nearest(key, paths)}"
        if on_unmatched == "error":
            raise UnmatchedRuleError(f"{message} Use on_unmatched='warn' or 'ignore' to allow it.")
        warnings.warn(message, stacklevel=3)


def _nearest(key: str, paths: list[str]) -> str:
    inside = [path for path in paths if path.startswith(f"{key}/")]
    if inside:
        return f"; it is the path of a container. For the layers inside write {f'{key}/.*'!r}."
    # `encoder/layrs/.*` should find `encoder/layers`: compare with every container too.
    parts = [path.split("/") for path in paths]
    prefixes = {"/".join(part[:n]): None for part in parts for n in range(1, len(part) + 1)}
    nearest = did_you_mean(key.removesuffix("/.*"), prefixes)
    if nearest != ".":
        return nearest
    return f". Layers: {', '.join(map(repr, paths[:10]))}{', …' if len(paths) > 10 else ''}."


def _policy_of(site: Site, policies: DTypePolicyMap) -> DTypePolicy:
    keys = set(policies)
    # A rule that is a path comes first, then one that is an alias, then patterns.
    aliases = [] if keys & set(site.paths) else [a for a in site.aliases if a in keys]
    named = {name: policies[name] for name in aliases or site.paths}
    if len(set(named.values())) > 1:
        raise LayerError(
            "A layer that is used in several places must have one policy. Received: "
            + ", ".join(f"{name!r}: {policy.name}" for name, policy in named.items())
        )
    return next(iter(named.values()))


def _plan_of(site: Site, policy: DTypePolicy) -> Plan:
    with _context(site, policy):
        return plan(policy, site.spec)


def _checked_step(adapter: Backend, site: Site, made: Plan, bytes_before: int) -> Step:
    step = Step(site=site, wrapping=Wrapping(plan=made, bytes_before=bytes_before))
    with _context(site, made.asked):
        adapter.validate(step)
    return step


def _changing(sites: list[Site], plans: dict[int, Plan], on_wrapped: OnWrapped) -> list[Site]:
    plain = [site for site in sites if site.wrapping is None]
    other = [
        site
        for site in sites
        if site.wrapping is not None and site.wrapping.plan.asked != plans[id(site)].asked
    ]
    if not other or on_wrapped == "keep":
        return plain
    if on_wrapped == "error":
        listed = [f"{site.path!r} has {_asked(site)}" for site in other]
        raise AlreadyWrappedError(
            f"Layers have another policy already: {', '.join(listed)}. Use on_wrapped='keep' to "
            "leave them as they are, or 'replace' to unwrap them first."
        )
    return [site for site in sites if site.wrapping is None or site in other]


def _asked(site: Site) -> str:
    assert site.wrapping is not None
    return site.wrapping.plan.asked.name


def _check_ties(
    adapter: Backend, sites: list[Site], plans: dict[int, Plan], changing: list[Site]
) -> None:
    """Refuses to treat two layers that share a weight in two ways: one of them would lose it."""
    owners: dict[object, tuple[Site, object]] = {}
    for site in sites:
        weight = site.tensors.get("weight")
        if weight is None:
            continue
        stays = site.wrapping is not None and not any(site is other for other in changing)
        made = site.wrapping.plan if stays and site.wrapping is not None else plans[id(site)]
        # What is stored counts, not what is computed: a float embedding and a float8 head that
        # trains keep the same float weight.
        stored = next(tensor.dtype for tensor in made.storage if tensor.name == "weight")
        form = (stored, made.scale_axes if made.quantized and not made.trainable else ())
        first, other_form = owners.setdefault(adapter.storage_key(weight), (site, form))
        if other_form != form:
            raise LayerError(
                f"{first.path!r} and {site.path!r} share one weight, but their policies "
                f"{plans[id(first)].asked.name!r} and {plans[id(site)].asked.name!r} store it in "
                "different ways. Give both one policy, or untie them first."
            )


@contextlib.contextmanager
def _context(site: Site, policy: DTypePolicy) -> Iterator[None]:
    """Gives errors of inner checks the layer's path and policy."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        error.add_note(f"at layer {site.path!r} under policy {policy.name!r}")
        raise
