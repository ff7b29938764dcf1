"""The attention kernels, compiled for the avx2 level."""

include "../attention.pyx"
