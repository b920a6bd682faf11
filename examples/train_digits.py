"""Trains the demo's digit classifier in plain numpy and writes its weights.

    python examples/train_digits.py src/backends/policy_numpy/data/digits.safetensors

needs `pip install 'policy-core[demo]'` and takes about ten seconds on two cores.
"""

import sys

import numpy as np

import policy_core as pc
from policy_numpy.digits import load_images, new_model

EPOCHS, BATCH, RATE, DECAY = 60, 64, 1e-3, 1e-2


def softmax(logits):
    """Gives the probabilities of each row of logits."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def gradients(layers, x, labels):
    """Gives the gradients of the mean cross-entropy, layer by layer, weight then bias."""
    inputs = [x]
    for layer in layers:
        inputs.append(layer(inputs[-1]))
    flow = softmax(inputs[-1])
    flow[np.arange(len(labels)), labels] -= 1
    flow /= len(labels)
    found = []
    for layer, before in zip(layers[::-1], inputs[-2::-1], strict=True):
        found.append((flow.T @ before, flow.sum(0)))
        # Each layer's input is the output of a relu, whose slope is 1 where it is positive.
        flow = (flow @ layer.weight) * (before > 0)
    return found[::-1]


def main(path):
    """Trains with AdamW, prints the accuracy, and saves the model to a path."""
    x, labels, held_out, answers = load_images()
    model = new_model(seed=0)
    generator = np.random.default_rng(0)
    arrays = [layer.tensors[name] for layer in model.layers for name in ("weight", "bias")]
    means = [np.zeros_like(array) for array in arrays]
    squares = [np.zeros_like(array) for array in arrays]
    step = 0
    for epoch in range(EPOCHS):
        rate = RATE * (1 - epoch / EPOCHS)
        order = generator.permutation(len(x))
        for start in range(0, len(x), BATCH):
            chosen = order[start : start + BATCH]
            step += 1
            found = [g for pair in gradients(model.layers, x[chosen], labels[chosen]) for g in pair]
            # Kingma and Ba, "Adam", algorithm 1; decay as in Loshchilov and Hutter, algorithm 2.
            for array, mean, square, gradient in zip(arrays, means, squares, found, strict=True):
                mean += 0.1 * (gradient - mean)
                square += 0.001 * (gradient**2 - square)
                update = (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
                array -= rate * (update + DECAY * array)
    accuracy = (model(held_out).argmax(1) == answers).mean()
    pc.save(model, path)
    print(f"held-out accuracy {accuracy:.4f}, saved to {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
