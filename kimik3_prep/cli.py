"""The command line: parse, call one function, print, exit code. No logic.

Exit codes: 0 done; 1 finished, some items failed; 2 bad input, config or usage; 3 run-time failure; 130 interrupted.
Heavy modules are imported inside the commands, so that `--help` and `validate-config` start without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from kimik3_prep import __version__
from kimik3_prep.errors import InputError, PrepError

app = typer.Typer(
    name="kimik3-prep",
    help="Prepare images for Kimi-K3 once, offline and exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Format = Annotated[Literal["text", "json"], typer.Option(help="JSON goes to stdout, progress and prose to stderr.")]


def main() -> None:
    """Entry point of the `kimik3-prep` command."""
    app()


@contextmanager
def _exit_codes(format: str) -> Iterator[None]:
    """Errors that this package raises on purpose end as a sentence and an exit code."""
    from kimik3_prep import terminal

    try:
        yield
    except PrepError as error:
        if format == "json":
            problems = [problem.as_dict() for problem in error.problems] if isinstance(error, InputError) else []
            terminal.print_json({"status": "error", "message": str(error), "problems": problems})
        else:
            terminal.print_error(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        terminal.err.print("interrupted; committed shards stay valid, run the same command to continue")
        raise typer.Exit(130) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001  a fault of ours; nobody's answer should be a traceback
        terminal.print_fault(error)
        raise typer.Exit(3) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kimik3-prep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("validate-config")
def validate_config(
    config: Annotated[
        str | None,
        typer.Argument(help="A preprocessor_config.json, a checkpoint folder, or kimi-k3 for the published one."),
    ] = None,
    write_fixed: Annotated[
        Path | None, typer.Option(help="Write a copy with the missing keys restored from the published config.")
    ] = None,
    format: Format = "text",
) -> None:
    """Say everything a preprocessor config means, and everything that is wrong with it."""
    from kimik3_prep import terminal
    from kimik3_prep.config import diagnose, find_config, write_fixed_copy

    with _exit_codes(format):
        diagnosis = diagnose(find_config(config))
        restored = write_fixed_copy(diagnosis, write_fixed) if write_fixed else None
        if format == "json":
            terminal.print_json(diagnosis.as_dict() | ({"restored": list(restored)} if restored is not None else {}))
        else:
            terminal.print_diagnosis(diagnosis)
            if restored is not None:
                terminal.out.print(f"{write_fixed}: restored {', '.join(restored) or 'nothing, no key is missing'}")
        raise typer.Exit(0 if diagnosis.config is not None else 2)


@app.command()
def encode(
    manifest: Annotated[str, typer.Argument(help="JSON Lines (may be gzip) or Parquet; - reads standard input.")],
    config: Annotated[
        str | None, typer.Option(help="preprocessor_config.json, its folder, or kimi-k3. Default: beside the manifest.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Output folder. Default: <manifest>-features.")
    ] = None,
    backend: Annotated[
        Literal["auto", "cpu", "gpu"], typer.Option(help="For rows that choose none; auto is gpu where CUDA is.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="For gpu rows: cuda (all devices), cuda:1, mps, or cpu to run its kernels there.")
    ] = None,
    batch_bytes: Annotated[str, typer.Option(help="Most bytes of decoded pixels in one device batch.")] = "256MiB",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "uint8"],
        typer.Option(help="Storage type of pixel_values; uint8 keeps the levels before normalisation."),
    ] = "float32",
    shard_size: Annotated[str, typer.Option(help="Most bytes of a shard: 200MB, 2GiB.")] = "512MiB",
    workers: Annotated[
        int | None, typer.Option("--workers", "-j", min=1, help="Image threads. Default: one a processor.")
    ] = None,
    dedupe: Annotated[Literal["path", "off"], typer.Option(help="Store an image once for all its rows.")] = "path",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of the manifest.")] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse images with more pixels.")] = 178_956_970,
    on_error: Annotated[
        Literal["record", "fail"], typer.Option(help="Record a failed item and go on, or stop the run.")
    ] = "record",
    max_failures: Annotated[int | None, typer.Option(min=0, help="Stop above this many failed items.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in a folder that holds a run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan; write nothing.")] = False,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
    format: Format = "text",
) -> None:
    """Encode a manifest of images into shards of pixel features."""
    from kimik3_prep import check, terminal
    from kimik3_prep import prepare as run
    from kimik3_prep.plan import parse_size

    with _exit_codes(format), terminal.ProgressReporter(progress) as reporter:
        settings = check.Settings(
            manifest=manifest,
            output=output or check.default_output(manifest),
            config=config,
            backend=backend,
            dtype=dtype,
            device=device,
            batch_bytes=parse_size(batch_bytes, "--batch-bytes"),
            shard_size=parse_size(shard_size, "--shard-size"),
            workers=workers or check.default_workers(),
            dedupe=dedupe == "path",
            limit=limit,
            max_pixels=max_pixels,
            on_error=on_error,
            max_failures=max_failures,
            overwrite=overwrite,
        )
        summary = run.dry_run(settings, reporter) if dry_run else run.prepare(settings, reporter)
    if format == "json":
        warnings = [problem.as_dict() for problem in reporter.warnings]
        terminal.print_json({"status": "ok", **asdict(summary), "warnings": warnings})
    else:
        terminal.print_summary(summary, dtype)
    raise typer.Exit(1 if summary.failed else 0)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A shard, an index or an output folder.")],
    format: Format = "text",
) -> None:
    """Show what lies in a shard, an index or an output folder."""
    from kimik3_prep import inspection, terminal

    with _exit_codes(format):
        found = inspection.inspect(path)
        if format == "json":
            terminal.print_json(found)
        else:
            terminal.print_inspection(found)


if __name__ == "__main__":
    main()
