"""Trains one small model on two logical CPU devices and on one, and prints both as JSON.

A process of its own: devices are fixed before TensorFlow starts, and a second MirroredStrategy in
one process gets the first one's messages.
"""

import json
import sys

import numpy as np
import tensorflow as tf

import policy_core as pc
import policy_tensorflow as pt

X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
X[5] *= 10  # the second replica's share has the largest value


class Model(tf.Module):
    """Two linear layers around a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [pt.Linear(8, 16), pt.LayerNorm(16), pt.Linear(16, 4)]
        for seed, layer in enumerate(self.layers[::2]):
            start = tf.random.stateless_normal(layer.weight.shape, (seed, 0)) * 0.3
            layer.weight.assign(start)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model, x):
    """Gives the loss's share and the gradients of a batch."""
    with pt.training(), tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(model(x), tf.float32) ** 2) / len(X)
    return loss, tape.gradient(loss, model.trainable_variables)


def descend(model, found):
    """Changes the variables of a model against their gradients."""
    for variable, gradient in zip(model.trainable_variables, found, strict=True):
        variable.assign_sub(0.01 * gradient)


def replicated(strategy, policy, inside):
    """Gives the losses and the model after three steps on two replicas."""
    with strategy.scope():
        model = Model()
        if inside:
            pc.wrap(model, policy)
    if not inside:
        pc.wrap(model, policy)

    def step(x):
        loss, found = gradients(model, x)
        context = tf.distribute.get_replica_context()
        descend(model, context.all_reduce(tf.distribute.ReduceOp.SUM, found))
        return loss

    @tf.function
    def run(x):
        return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

    data = tf.data.Dataset.from_tensor_slices(X).batch(8).repeat()
    batches = iter(strategy.experimental_distribute_dataset(data))
    return [float(run(next(batches))) for _ in range(3)], model


def alone(policy):
    """Gives the losses and the model after three steps on one device."""
    model = pc.wrap(Model(), policy)
    losses = []
    for _ in range(3):
        loss, found = gradients(model, tf.constant(X))
        descend(model, found)
        losses.append(float(loss))
    return losses, model


def histories(model):
    """Gives the newest entries of all amax histories of the first layer."""
    layer = model.layers[0]
    roles = ("input", "weight", "output_grad")
    names = [f"{role}_amax_history" for role in roles if hasattr(layer, f"{role}_amax_history")]
    return [getattr(layer, name).numpy()[:4].tolist() for name in names]


def main() -> None:
    """Prints the losses and histories of each policy."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    results = {}
    for policy, inside in [
        ("int8_from_float32", True),
        ("float8_from_float32", False),
    ]:
        both, model = replicated(strategy, policy, inside)
        one, single = alone(policy)
        results[f"{policy} {'inside' if inside else 'outside'}"] = {
            "losses": [both, one],
            "histories": [histories(model), histories(single)],
            "mirrored": all(hasattr(v, "values") for v in model.variables),
        }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
