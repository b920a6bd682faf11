"""The demo's data and model: scikit-learn's handwritten digits, and a multilayer perceptron."""

from importlib.resources import as_file, files

import numpy as np

import policy_core as pc

from ._models import Dense, Sequential
from ._ops import Array

HELD_OUT_EVERY = 5
"""Every fifth image is held out: 360 of 1,797. The others, 1,437, train."""


def load_images() -> tuple[Array, Array, Array, Array]:
    """Gives training images and labels, then held-out images and labels.

    Returns:
        float32 images of shape (n, 64), from 0 to 1, and int64 labels of shape (n,), twice.

    Raises:
        ImportError: scikit-learn, which ships the images, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "The demo reads the handwritten digits that scikit-learn ships. Install it with "
            "`pip install 'policy-core[demo]'`."
        ) from error
    images, labels = load_digits(return_X_y=True)
    # The images hold 17 levels of grey, 0 to 16.
    images = (images / 16).astype(np.float32)
    held_out = np.arange(len(images)) % HELD_OUT_EVERY == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def new_model(seed: int | None = None) -> Sequential:
    """Gives the untrained model: 64 pixels, two layers of 512, 10 digits; 301,066 parameters."""
    return Sequential(
        [
            Dense(64, 512, activation="relu", seed=seed),
            Dense(512, 512, activation="relu", seed=None if seed is None else seed + 1),
            Dense(512, 10, seed=None if seed is None else seed + 2),
        ]
    )


def trained_model() -> Sequential:
    """Gives the model with the weights that `examples/train_digits.py` trained."""
    with as_file(files(__package__) / "data" / "digits.safetensors") as path:
        model: Sequential = pc.load(new_model(seed=0), path)
    return model
