"""The attention kernels, compiled for the baseline level."""

include "../attention.pyx"
