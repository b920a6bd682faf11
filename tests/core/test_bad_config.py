"""Configs that cannot be read, and the registry of what may be built from them."""

import copy
import os
import re
import sys

import pytest

import policy_core as pc
from policy_core import _registry
from policy_core.errors import ConfigError


def nested(depth, wrap):
    value = "float32"
    for _ in range(depth):
        value = wrap(value)
    return value


def config_of(kind, **config):
    return {"class_name": kind, "config": config}


BAD_CONFIGS = [
    pytest.param(config_of("PolicyV2", name="float32"), "Did you mean 'PolicyV1'?", id="typo"),
    pytest.param(config_of("system"), "Unknown class 'system' in a config. Known: ", id="unknown"),
    pytest.param(
        {"module": "os", "class_name": "system", "config": {"command": "true"}},
        "Unknown class 'system'",
        id="a-function-of-os",
    ),
    pytest.param(config_of("os.system"), "Unknown class 'os.system'", id="dotted"),
    pytest.param(config_of(None), "Unknown class None", id="class-none"),
    pytest.param(config_of(["DTypePolicy"]), "Unknown class ['DTypePolicy']", id="class-list"),
    pytest.param(
        {**config_of("DTypePolicy", name="float32"), "registered_name": "mine>DTypePolicy"},
        "Unknown class 'mine>DTypePolicy'",
        id="registered-name",
    ),
    pytest.param({}, "it has no 'class_name'", id="empty"),
    pytest.param({"name": "float32"}, "it has no 'class_name'", id="only-a-name"),
    pytest.param(
        {**config_of("DTypePolicy", name="float32"), "weights": 1},
        "Unknown field 'weights' in a config",
        id="outer-field",
    ),
    pytest.param(
        config_of("DTypePolicy", name="float32", mode="int8"),
        "Unknown field 'mode' in the config of DTypePolicy",
        id="inner-field",
    ),
    pytest.param(
        config_of("QuantizedDTypePolicy", mode="int8", amax_history_length=3),
        "Unknown field 'amax_history_length'",
        id="field-of-another-class",
    ),
    pytest.param(
        config_of("DTypePolicyMap", policies={}), "Known: ['default_policy',", id="map-field"
    ),
    pytest.param(config_of("QuantizedDTypePolicy"), "must have 'mode'", id="mode-missing"),
    pytest.param(
        config_of("QuantizedDTypePolicy", mode="int8", name="int8_from_float32"),
        "must have 'mode', or in its older form 'name'",
        id="mode-and-name",
    ),
    pytest.param(
        config_of("QuantizedDTypePolicy", mode="int7"), "Invalid quantization mode", id="mode"
    ),
    pytest.param(
        config_of("QuantizedFloat8DTypePolicy", mode="float8", amax_history_length=10**12),
        "must be between 1 and 1048576",
        id="history-that-takes-all-memory",
    ),
    pytest.param(
        config_of("DTypePolicyMap", policy_map={"(a+)+\\1": "float32"}),
        "could take unbounded time",
        id="hostile-pattern",
    ),
    pytest.param(
        config_of("DTypePolicyMap", policy_map={"a": config_of("DTypePolicyMap")}),
        "a map cannot hold a map",
        id="map-in-a-map",
    ),
    pytest.param(
        nested(1000, lambda inner: config_of("DTypePolicyMap", default_policy=inner)),
        "A config may be nested 100 deep",
        id="maps-a-thousand-deep",
    ),
    pytest.param(
        nested(1000, lambda inner: {"class_name": inner}), "100 deep", id="dicts-a-thousand-deep"
    ),
    pytest.param(nested(100_000, lambda inner: [inner]), "100 deep", id="lists-100,000-deep"),
    pytest.param([0] * 1_000_001, "A config may hold 1000000 values", id="huge"),
    pytest.param(
        nested(30, lambda inner: [inner] * 1000), "1000000 values", id="huge-by-shared-lists"
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS)
def test_bad_configs_are_refused(config, message):
    """A config that cannot be read is refused with one clear ValueError, by either door."""
    doors = [pc.deserialize, pc.get] if isinstance(config, dict) else [pc.deserialize]
    for door in doors:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            door(config)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(123, "Could not parse config: 123 of type <class 'int'>", id="number"),
        pytest.param(b"float32", "Could not parse config: b'float32'", id="bytes"),
        pytest.param([1.5], "Could not parse config: 1.5", id="number-in-a-list"),
        pytest.param({"class_name": "DTypePolicy"}, "'config' to be a dict", id="no-config"),
        pytest.param(
            {"class_name": "DTypePolicy", "config": []}, "Received: []", id="config-is-a-list"
        ),
        pytest.param(config_of("DTypePolicy", name=123), "'name' must be a string", id="name"),
        pytest.param(
            config_of("QuantizedDTypePolicy", mode=8), "'mode' must be a string", id="mode"
        ),
        pytest.param(
            config_of("DTypePolicyMap", policy_map=[1]), "`policy_map` must be a dict", id="rules"
        ),
    ],
)
def test_wrong_types_are_refused(config, message):
    """A config with a value of another type is refused with a TypeError that shows it."""
    with pytest.raises(TypeError, match=re.escape(message)):
        pc.deserialize(config)


def test_nothing_is_imported_by_a_name_from_a_config(monkeypatch):
    """A config that names a module and a class neither imports the module nor runs anything."""
    ran = []
    monkeypatch.setattr(os, "system", ran.append)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    for name in ("system", "os.system", "os>system", "Zen"):
        for module in ("os", "this"):
            config = {"module": module, "class_name": name, "config": {}, "registered_name": name}
            before = copy.deepcopy(config)
            with pytest.raises(ConfigError, match="Unknown class"):
                pc.deserialize(config)
            assert config == before
    assert (ran, "this" in sys.modules) == ([], False)


class Block:
    def get_config(self):
        return {}

    @classmethod
    def from_config(cls, config):
        return cls()


BLOCK = {"class_name": "Block", "config": {}, "registered_name": "mine>Block"}


@pytest.mark.parametrize("name", ["Block", "mine>Block"])
def test_custom_objects(registry, name):
    """A class is known by either name for one call, inside a scope, or after registration."""
    assert isinstance(pc.deserialize(BLOCK, custom_objects={name: Block}), Block)
    with pc.custom_object_scope({name: Block}):
        assert isinstance(pc.deserialize([BLOCK])[0], Block)
    with pytest.raises(ConfigError, match="Unknown class 'mine>Block'"):
        pc.deserialize(BLOCK)
    pc.register_serializable("mine")(Block)
    assert isinstance(pc.deserialize(BLOCK), Block)
    assert "mine>Block" in _registry.registered_keys()


def test_scopes_nest(registry):
    """Inner names come first, and each scope ends with its block, also by an exception."""

    class Inner(Block):
        pass

    def fail_inside():
        with pc.custom_object_scope({"Block": Inner}):
            assert type(pc.deserialize(BLOCK)) is Inner
            raise KeyError

    with pc.custom_object_scope({"Block": Block}):
        with pytest.raises(KeyError):
            fail_inside()
        assert type(pc.deserialize(BLOCK)) is Block
    with pytest.raises(ConfigError):
        pc.deserialize(BLOCK)


def test_a_class_defined_anew_takes_the_place_of_the_old(registry):
    """Running a definition again, as notebooks do, registers the new class."""

    def define():
        @pc.register_serializable("notebook")
        class Cell(Block):
            pass

        return Cell

    first, second = define(), define()
    assert type(pc.deserialize(pc.serialize(second()))) is second
    with pytest.raises(TypeError, match="Cannot serialize object"):
        pc.serialize(first())


@pytest.mark.parametrize(
    ("register", "error", "message"),
    [
        pytest.param(lambda: pc.register_serializable(Block), TypeError, "parentheses", id="bare"),
        pytest.param(lambda: pc.register_serializable(name=3), TypeError, "name=3", id="name"),
        pytest.param(
            lambda: pc.register_serializable()(len), TypeError, "Only classes", id="function"
        ),
        pytest.param(
            lambda: pc.register_serializable()(int), ValueError, "get_config() method", id="plain"
        ),
        pytest.param(
            lambda: pc.register_serializable("taken", "x")(Block),
            ValueError,
            "'taken>x' is registered already, for ",
            id="taken",
        ),
        pytest.param(
            lambda: pc.deserialize(BLOCK, custom_objects=[Block]),
            TypeError,
            "Custom objects must be a dict",
            id="objects-list",
        ),
        pytest.param(
            lambda: pc.deserialize(BLOCK, custom_objects={"Block": len}),
            TypeError,
            "'Block': <built-in function len>",
            id="objects-function",
        ),
        pytest.param(
            lambda: pc.custom_object_scope({"Block": int}).__enter__(),
            TypeError,
            "have a from_config() method",
            id="objects-plain",
        ),
    ],
)
def test_registry_refuses(registry, register, error, message):
    """A wrong registration is refused with its reason, and registers nothing."""

    @pc.register_serializable("taken", "x")
    class Other(Block):
        pass

    before = _registry.registered_keys()
    with pytest.raises(error, match=re.escape(message)):
        register()
    assert _registry.registered_keys() == before


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        pytest.param(object(), TypeError, "Cannot serialize object <object", id="object"),
        pytest.param(Block(), TypeError, "@policy_core.register_serializable()", id="unregistered"),
        pytest.param({1: 2}, TypeError, "keys must be strings. Received: 1", id="key"),
        pytest.param({"a": {1, 2}}, TypeError, "Cannot serialize object {1, 2}", id="set"),
        pytest.param(nested(1000, lambda x: [x]), ConfigError, "nested 100 deep", id="deep"),
    ],
)
def test_serialize_refuses(value, error, message):
    """What has no config is refused with what came."""
    with pytest.raises(error, match=re.escape(message)):
        pc.serialize(value)


def test_a_list_that_holds_itself_is_refused():
    """A cycle is refused rather than followed."""
    cycle: list = []
    cycle.append(cycle)
    for door in (pc.serialize, pc.deserialize):
        with pytest.raises(ConfigError, match="100 deep"):
            door(cycle)


def test_get_wants_a_policy(registry):
    """The config of a registered object that is no policy is no identifier of one."""
    pc.register_serializable("mine")(Block)
    with pytest.raises(ConfigError, match="Expected the config of a policy"):
        pc.get(BLOCK)
