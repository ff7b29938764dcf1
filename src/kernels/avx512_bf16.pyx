"""The attention kernels, compiled for the avx512_bf16 level."""

include "../attention.pyx"
