"""The attention kernels, compiled for the avx512 level."""

include "../attention.pyx"
