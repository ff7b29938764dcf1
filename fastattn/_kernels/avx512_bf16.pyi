from fastattn._kernels.baseline import *  # noqa: F403 - the same shape
