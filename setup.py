"""Builds the optional CPU kernels; everything else about the package is in pyproject.toml.

The kernels are a plain shared library with a C interface, loaded with ctypes: building needs a C++17 compiler and
nothing else. `optional=True`: without a compiler the package still installs, and runs on torch instead.
"""

from glob import glob

from setuptools import Extension, setup

KERNELS = "autopipe/core/kernels"

setup(
    ext_modules=[
        Extension(
            "autopipe.core.kernels._native",
            sources=sorted(glob(f"{KERNELS}/*.cpp")),
            depends=sorted(glob(f"{KERNELS}/*.h")),
            # No contraction: a*b+c is one rounding only where the source says so, in every build.
            # No -march: the instruction sets are chosen per file, and at run time by the CPU found.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-pthread",
                "-fvisibility=hidden",
                "-Wall",
                "-Wno-maybe-uninitialized",
                "-g0",
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ]
)
