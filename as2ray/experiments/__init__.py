"""Experiments: stage folders, and configurations read from YAML files and flags.

Must not import `as2ray.serving` or `as2ray.cli`.
"""
