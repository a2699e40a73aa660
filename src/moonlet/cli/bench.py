"""``moonlet bench``: measurements with their hardware bound, and load on a server."""

from __future__ import annotations

from cyclopts import App

from moonlet.cli.bench_engine import engine_command
from moonlet.cli.bench_kernels import kernels_command
from moonlet.cli.bench_longctx import longctx_command
from moonlet.cli.bench_serve import serve_command

__all__ = ["bench_app"]

bench_app = App(
    name="bench", help="Measure speed against the bound of this machine, or put load on a server."
)
bench_app.command(engine_command, name="engine")
bench_app.command(kernels_command, name="kernels")
bench_app.command(longctx_command, name="longctx")
bench_app.command(serve_command, name="serve")
