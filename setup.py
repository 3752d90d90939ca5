from pathlib import Path

from setuptools import find_packages, setup

_REPORT = ["Jinja2", "matplotlib"]

setup(
    name="simplefsdp",
    version="0.1.0",
    description="Fully sharded data parallel training for PyTorch, scheduled by the compiler",
    long_description=Path("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    python_requires=">=3.11",
    packages=find_packages(include=["simplefsdp*", "inductor_passes*"]),
    package_data={"": ["py.typed", "*.html", "*.cpp", "*.c"]},
    install_requires=["torch>=2.11", "numpy", "tqdm", "filelock", "platformdirs"],
    extras_require={
        "report": _REPORT,
        "torchtitan": ["torchtitan==0.3.0", "triton"],  # one more system for benchmarks/overlap.py
        "dev": [
            *_REPORT,
            "transformers",
            "accelerate",
            "lightning",
            "pytorch-optimizer",
            "torchao",
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "expecttest",
            "triton",  # whose interpreter runs the kernels for GPUs
            "ruff",
            "mypy",
            "types-tqdm",
            "setuptools>=70.1",  # builds a wheel by itself; torch 2.11 brings none
        ],
        "docs": ["mkdocs-material", "mkdocstrings[python]"],
    },
    entry_points={
        "console_scripts": ["simplefsdp = simplefsdp.cli.main:main"],
        "torch_dynamo_backends": ["simplefsdp = simplefsdp.compile.backend:simplefsdp"],
    },
)
