"""The Keras backend passes the contract, on the framework that this process has chosen."""

import keras
import numpy as np

import policy_keras
from policy_core._backend import tensor_backend
from policy_core.testing import BackendContract


@keras.saving.register_keras_serializable("policy_core_tests")
class Chain(keras.Model):
    """Layers one after the other, with their positions as names."""

    def __init__(self, links, **kwargs):
        super().__init__(**kwargs)
        self.length = len(links)
        for i, layer in enumerate(links):
            setattr(self, str(i), layer)

    @property
    def links(self):
        return [getattr(self, str(i)) for i in range(self.length)]

    def call(self, x, training=None):
        for layer in self.links:
            x = layer(x, training=training)
        return x

    def get_config(self):
        links = [keras.saving.serialize_keras_object(layer) for layer in self.links]
        return {**super().get_config(), "links": links}

    @classmethod
    def from_config(cls, config):
        links = [keras.saving.deserialize_keras_object(link) for link in config.pop("links")]
        return cls(links, **config)


class TestKeras(BackendContract):
    """Keras layers, in a model that makes them anew when it is loaded."""

    backend_name = "keras"

    def linear(self, weight, bias):
        # Zeros first: random numbers would be compiled for each shape on JAX.
        options = {"use_bias": bias is not None, "kernel_initializer": "zeros"}
        layer = keras.layers.Dense(weight.shape[0], **options)
        layer.build((None, weight.shape[1]))
        layer.set_weights([weight.T] if bias is None else [weight.T, bias])
        return layer

    def embedding(self, table):
        layer = keras.layers.Embedding(*table.shape, embeddings_initializer="zeros")
        layer.build()
        layer.set_weights([table])
        return layer

    def norm(self, width):
        layer = keras.layers.LayerNormalization(epsilon=1e-5)
        layer.build((None, width))
        return layer

    def sequential(self, layers):
        model = Chain(layers)
        model.built = True
        return model

    def layers(self, model):
        return model.links

    def run(self, model, x, training=False):
        # Keras's layers want an axis of examples.
        rows = x if x.ndim > 1 or x.dtype.kind != "f" else x[None]
        y = policy_keras.backend.to_numpy(model(rows, training=training))
        return y if rows is x else y[0]

    def test_tensors_are_known_by_type(self):
        """A tensor belongs to the framework, a symbolic tensor and a variable to Keras."""
        kind = type(self.tensor(np.ones(2, np.float32)))
        assert tensor_backend(kind).name == keras.config.backend()
        for kind in (keras.KerasTensor, type(keras.Variable(np.ones(2, np.float32)))):
            assert tensor_backend(kind) is self.backend
        assert not self.backend.is_tensor_type(list)
