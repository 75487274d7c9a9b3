"""Loads the fast BLAS before any test module of this folder imports mlx."""

from worker import blas

blas.load()
