"""Keras in a process of its own: a JSON request on each line of stdin, an answer on stdout.

Only there can `KERAS_BACKEND` be chosen whatever other tests have imported.
"""

import json
import sys

ATTRIBUTES = (
    *("name", "compute_dtype", "variable_dtype", "quantization_mode", "amax_history_length"),
    *("block_size", "weight_bits", "group_size"),
)


def describe(policy, serialize):
    """Gives the config of a policy and the attributes that it has, Keras's or ours."""
    attributes = {name: getattr(policy, name) for name in ATTRIBUTES if hasattr(policy, name)}
    # Last, because Keras changes the policies of a map when it serializes it.
    return {"attributes": attributes, "config": serialize(policy)}


def make(module, spec):
    """Makes a policy from a name, from [class name, *arguments], or a map from a dict."""
    if isinstance(spec, list):
        return getattr(module, spec[0])(*spec[1:])
    if isinstance(spec, dict):
        default = spec["default"]
        policies = module.DTypePolicyMap(
            make(module, default) if isinstance(default, list) else default
        )
        for key, value in spec["rules"].items():
            policies[key] = make(module, value)
        return policies
    return module.get(spec)


def answer(module, request):
    """Does what a request asks of `keras.dtype_policies`, or of ours."""
    try:
        if "paths" in request:
            policies = make(module, request["make"])
            return {"names": [policies[path].name for path in request["paths"]]}
        if "read" in request:
            return describe(module.deserialize(request["read"]), module.serialize)
        return describe(make(module, request["make"]), module.serialize)
    except (TypeError, ValueError) as error:
        return {"error": str(error)}


def main():
    """Answers requests until stdin ends."""
    from keras import dtype_policies

    for line in sys.stdin:
        print(json.dumps(answer(dtype_policies, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
