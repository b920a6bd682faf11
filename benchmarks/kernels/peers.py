"""What else multiplies on this machine: each peer makes a call of no arguments, or says why not."""

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

Call = Callable[[], Any]


class Operands(NamedTuple):
    """One product: float32 x (m, k), weight (n, k), bias (n,)."""

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray


class Unavailable(Exception):
    """A peer is not installed, or cannot do this; the message says why."""


def torch_float(operands: Operands, threads: int, dtype: str) -> Call:
    import torch

    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    x, weight, bias = (torch.from_numpy(array).to(kind) for array in operands)

    def call() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.linear(x, weight, bias)

    return call


def _torch_layer(operands: Operands) -> Any:
    import torch

    layer = torch.nn.Linear(operands.x.shape[1], len(operands.weight))
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(operands.weight))
        layer.bias.copy_(torch.from_numpy(operands.bias))
    return torch.nn.Sequential(layer).eval()


def torch_dynamic(operands: Operands, threads: int, engine: str) -> Call:
    import torch

    if engine not in torch.backends.quantized.supported_engines:
        raise Unavailable(f"this torch has no quantized engine {engine!r}")
    torch.set_num_threads(threads)
    torch.backends.quantized.engine = engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(
            _torch_layer(operands), {torch.nn.Linear}, dtype=torch.qint8
        )
    x = torch.from_numpy(operands.x)

    def call() -> Any:
        torch.backends.quantized.engine = engine
        with torch.inference_mode():
            return model(x)

    return call


def torchao_compiled(operands: Operands, threads: int) -> Call:
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise Unavailable(f"torchao is not installed ({error})") from error
    import torch

    torch.set_num_threads(threads)
    model = _torch_layer(operands)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    torch._dynamo.reset()
    compiled = torch.compile(model)
    x = torch.from_numpy(operands.x)

    def call() -> Any:
        with torch.inference_mode():
            return compiled(x)

    return call


def onnxruntime_dynamic(operands: Operands, threads: int) -> Call:
    try:
        import onnx
        import onnxruntime
        from onnx import TensorProto, helper, numpy_helper
    except ImportError as error:
        raise Unavailable(f"onnxruntime or onnx is not installed ({error})") from error
    weight = operands.weight.T
    scale = np.abs(weight).max(0) / np.float32(127)
    codes = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
    constants = [
        numpy_helper.from_array(codes, "w"),
        numpy_helper.from_array(scale.astype(np.float32), "w_scale"),
        numpy_helper.from_array(operands.bias, "bias"),
    ]
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "x_scale", "x_zero"]),
        helper.make_node("MatMulInteger", ["xq", "w", "x_zero"], ["acc"]),
        helper.make_node("Cast", ["acc"], ["accf"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x_scale", "w_scale"], ["scale"]),
        helper.make_node("Mul", ["accf", "scale"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["y"]),
    ]
    m, k = operands.x.shape
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [m, k])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [m, weight.shape[1]])]
    graph = helper.make_graph(nodes, "linear", inputs, outputs, constants)
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, {"x": operands.x})


def tflite_dynamic(operands: Operands, threads: int) -> Call:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise Unavailable(f"tensorflow is not installed ({error})") from error
    if not hasattr(tf, "lite"):
        raise Unavailable("this tensorflow has no tf.lite")
    weight, bias = tf.constant(operands.weight.T), tf.constant(operands.bias)

    class Layer(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec(operands.x.shape, tf.float32)])
        def __call__(self, x: Any) -> Any:
            return tf.matmul(x, weight) + bias

    layer = Layer()
    function = layer.__call__.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], layer)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    interpreter = tf.lite.Interpreter(model_content=converter.convert(), num_threads=threads)
    interpreter.allocate_tensors()
    x = interpreter.get_input_details()[0]["index"]
    y = interpreter.get_output_details()[0]["index"]

    def call() -> Any:
        interpreter.set_tensor(x, operands.x)
        interpreter.invoke()
        return interpreter.get_tensor(y)

    return call


PEERS: dict[str, Callable[[Operands, int], Call]] = {
    "torch float32": lambda o, t: torch_float(o, t, "float32"),
    "torch bfloat16": lambda o, t: torch_float(o, t, "bfloat16"),
    "torch dynamic onednn": lambda o, t: torch_dynamic(o, t, "onednn"),
    "torch dynamic x86": lambda o, t: torch_dynamic(o, t, "x86"),
    "torchao compiled": torchao_compiled,
    "onnxruntime dynamic": onnxruntime_dynamic,
    "tflite dynamic": tflite_dynamic,
}

FLOAT_PEERS = ("torch float32", "torch bfloat16")


def available(operands: Operands, threads: int, names: list[str]) -> Iterator[tuple[str, Call]]:
    """Gives each peer that runs; prints a line for each that does not."""
    for name in names:
        try:
            call = PEERS[name](operands, threads)
            call()
        except Exception as error:
            print(f"skipped {name}: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        yield name, call
