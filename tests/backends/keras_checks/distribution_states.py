"""What a wrapped Keras model keeps, compared between one device and several."""

import numpy as np

import policy_keras
from policy_core.testing import same_bits


def state_of(model):
    """Gives a model's tensors, codes and float8 state included, by path and name."""
    read = policy_keras.backend.to_numpy
    sites = policy_keras.backend.walk(model)
    return {f"{s.path}/{n}": np.array(read(t)) for s in sites for n, t in s.tensors.items()}


def same_states(model, other):
    """Says whether two models keep the same tensors, to the bit."""
    ours, theirs = state_of(model), state_of(other)
    return ours.keys() == theirs.keys() and all(same_bits(ours[n], theirs[n]) for n in ours)
