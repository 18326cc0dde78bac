"""Layers of tasks that have weights of their own, twice differentiable, on a GPU, in Triton.

That is what adaptation by steps needs: after a step every task has its own network, and slopes go
through the slopes of that step. Images have shape (tasks, images, channels, height, width) and lie
channels-last, task after task; weights have a leading dimension over tasks.
"""

from rabo.models.adapted.convolution import convolve
from rabo.models.adapted.normalisation import normalise

__all__ = ["convolve", "normalise"]
