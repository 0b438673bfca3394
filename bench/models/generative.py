"""Models that make images: DCGAN and an autoencoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from models.model import Model, Region, call, images, normal


@dataclass(frozen=True)
class Rivals(Model):
    """A generator and a discriminator, each with its optimizer.

    ``loss`` is the generator's; a step updates both.
    """

    def trainer(self) -> Callable[[int], None]:
        """Return a step that trains both networks."""
        make, judge = self.link
        optimizers = [self.make_optimizer().setup(link) for link in self.link]

        def step(batch: int) -> None:
            """Update the generator, then the discriminator on the same images."""
            noise, images = self.inputs(batch)
            fake = make(noise)
            del noise
            judged = judge(fake)
            optimizers[0].update(lambda: F.mean(F.softplus(-judged)))
            fake.unchain_backward()
            real = judge(images)
            optimizers[1].update(
                lambda: F.mean(F.softplus(judge(fake))) + F.mean(F.softplus(-real))
            )

        return step


def dcgan(pixels: int = 32, width: int = 64) -> Rivals:
    """Build a DCGAN: a generator and a discriminator."""
    side = pixels // 8
    make = chainer.Sequential(
        L.Linear(100, 4 * width * side**2),
        lambda x: F.reshape(x, (-1, 4 * width, side, side)),
        L.BatchNormalization(4 * width),
        F.relu,
        L.Deconvolution2D(4 * width, 2 * width, 4, 2, 1),
        L.BatchNormalization(2 * width),
        F.relu,
        L.Deconvolution2D(2 * width, width, 4, 2, 1),
        L.BatchNormalization(width),
        F.relu,
        L.Deconvolution2D(width, 3, 4, 2, 1),
        F.tanh,
    )
    judge = chainer.Sequential(
        L.Convolution2D(3, width, 4, 2, 1),
        F.leaky_relu,
        L.Convolution2D(width, 2 * width, 4, 2, 1),
        L.BatchNormalization(2 * width),
        F.leaky_relu,
        L.Convolution2D(2 * width, 4 * width, 4, 2, 1),
        L.BatchNormalization(4 * width),
        F.leaky_relu,
        L.Linear(4 * width * side**2, 1),
    )

    def inputs(batch: int) -> tuple[Any, Any]:
        return normal(batch, 100), normal(batch, 3, pixels, pixels)

    def loss(noise: Any, _: Any, region: Region = call) -> Any:
        return F.mean(F.softplus(-region(judge, region(make, noise))))

    return Rivals(chainer.ChainList(make, judge), inputs, loss, "Adam")


def autoencoder(pixels: int = 32) -> Model:
    """Build a convolutional autoencoder."""
    model = chainer.Sequential(
        L.Convolution2D(3, 32, 3, 2, 1),
        F.elu,
        L.Convolution2D(32, 64, 3, 2, 1),
        F.elu,
        L.Linear(64 * (pixels // 4) ** 2, 128),
        F.sigmoid,
        L.Linear(128, 64 * (pixels // 4) ** 2),
        F.elu,
        lambda x: F.reshape(x, (-1, 64, pixels // 4, pixels // 4)),
        L.Deconvolution2D(64, 32, 4, 2, 1),
        F.elu,
        L.Deconvolution2D(32, 3, 4, 2, 1),
    )

    def loss(x: Any, region: Region = call) -> Any:
        return F.mean_squared_error(region(model, x), x)

    return Model(model, lambda batch: images(pixels, 1)(batch)[:1], loss, "RMSprop")


MODELS = {"DCGAN": {"32 px": dcgan}, "autoencoder": {"32 px": autoencoder}}
