"""How `tf.vectorized_map` and `tf.jacobian` see the kernels' operators.

Rows are rows, so one more leading axis changes nothing. What else is stacked goes one by one.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from ._ops import Tensor

Operators = dict[str, Callable[..., Any]]


def register(names: dict[str, str], operators: Operators) -> None:
    """Makes the operators' vectorized forms known.

    Args:
        names: What TensorFlow calls each.
        operators: The functions that call them.
    """
    for name, convert in {
        "linear": _linear_in_pfor,
        "encode": _encode_in_pfor,
        "quantize_rows": _quantize_rows_in_pfor,
        "rows": _rows_in_pfor,
    }.items():
        pfor.RegisterPFor(names[name])(functools.partial(convert, operators))


def _again(operators: Operators, name: str, given: Any, *inputs: Tensor) -> Any:
    names = [arg.name for arg in given.op.op_def.input_arg]
    attributes = {
        attr.name: given.get_attr(attr.name)
        for attr in given.op.op_def.attr
        if attr.name not in ("T", "B")
    }
    return operators[name](**dict(zip(names, inputs, strict=True)), **attributes)


def _one_by_one(operators: Operators, name: str, given: Any) -> Any:
    stacked = [given.input(i) for i in range(given.num_inputs)]

    def one(index: Tensor) -> Any:
        return _again(
            operators, name, given, *[t[index] if is_stacked else t for t, is_stacked, _ in stacked]
        )

    length = given.pfor.loop_len_vector[0]
    outputs = [output.dtype for output in given.outputs]
    made = tf.map_fn(
        one, tf.range(length), fn_output_signature=outputs[0] if len(outputs) == 1 else outputs
    )
    results = [made] if len(outputs) == 1 else made
    for result, output in zip(results, given.outputs, strict=True):
        result.set_shape(tf.TensorShape([None]).concatenate(output.shape))
    return [pfor.wrap(result, True) for result in results]


def _linear_in_pfor(operators: Operators, given: Any) -> Any:
    x, x_scale, *rest = (given.input(i) for i in range(5))
    one_scale = given.op.inputs[1].shape.rank == 0
    rows_have_scales = given.op.inputs[0].dtype == tf.uint8 and not one_scale
    if any(t.is_stacked for t in rest) or x_scale.is_stacked != rows_have_scales:
        return _one_by_one(operators, "linear", given)
    if not x.is_stacked:
        return _one_by_one(operators, "linear", given)
    y = _again(operators, "linear", given, x.t, x_scale.t, *[t.t for t in rest])
    return pfor.wrap(y, True)


def _encode_in_pfor(operators: Operators, given: Any) -> Any:
    x, scale = given.input(0), given.input(1)
    if scale.is_stacked:
        return _one_by_one(operators, "encode", given)
    return pfor.wrap(_again(operators, "encode", given, x.t, scale.t), True)


def _quantize_rows_in_pfor(operators: Operators, given: Any) -> Any:
    made = _again(operators, "quantize_rows", given, given.stacked_input(0))
    return [pfor.wrap(made.codes, True), pfor.wrap(made.scale, True)]


def _rows_in_pfor(operators: Operators, given: Any) -> Any:
    ids, *rest = (given.input(i) for i in range(3))
    if any(t.is_stacked for t in rest):
        return _one_by_one(operators, "rows", given)
    return pfor.wrap(_again(operators, "rows", given, ids.t, *[t.t for t in rest]), True)
