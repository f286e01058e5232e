"""Packages of the wheel: every folder of the library, and `cli` under a name that no other project has.

Everything else is in pyproject.toml, which cannot declare both discovery and the other name.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["efficient_attn", "efficient_attn.*"]), "efficient_attn_cli"],
    package_dir={"efficient_attn_cli": "cli"},
)
