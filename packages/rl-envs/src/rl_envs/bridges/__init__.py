"""Bridges: environments of other projects, behind our interface.

A folder is a project, and the only place that imports it, where it is needed: each
class here can be imported, listed and asked for its settings without the package. The
extra of the same name installs it (`rl-envs[reasoning-gym]`).
"""
