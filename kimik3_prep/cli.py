"""The command line: parse, call one function, print, exit code. No logic.

Exit codes: 0 done; 1 finished, some items failed; 2 bad input, config or usage; 3 run-time failure; 130 interrupted,
143 told to end (SIGTERM).
Heavy modules are imported inside the commands, so that `--help` and `validate-config` start without them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from kimik3_prep import __version__
from kimik3_prep.errors import InputError, PrepError, Problem

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
    _speak_utf8()
    _occupy_standard_streams()
    signal.signal(signal.SIGTERM, _terminate)
    app()


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as batch systems send it: the run ends as with Ctrl-C."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _speak_utf8() -> None:
    """Start again in UTF-8 mode where the locale has fewer letters than file names: Python sets that at its start."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _occupy_standard_streams() -> None:
    """A closed stdin, stdout or stderr must not become the number of a shard that a library's message goes into."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@contextmanager
def _exit_codes(format: str) -> Iterator[None]:
    """Errors that this package raises on purpose end as a sentence and an exit code."""
    from kimik3_prep import terminal

    try:
        yield
    except PrepError as error:
        if format == "json" and not isinstance(error, terminal.CannotPrint):
            problems = [problem.as_dict() for problem in error.problems] if isinstance(error, InputError) else []
            terminal.print_json({"status": "error", "message": str(error), "problems": problems})
        else:
            terminal.print_error(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt as stop:
        terminal.err.print("interrupted; committed shards stay valid, run the same command to continue")
        raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None
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
    manifest: Annotated[
        str,
        typer.Argument(
            help="JSON Lines (may be gzip), Parquet, or a tar of images; a path, URL or pattern; - is stdin."
        ),
    ],
    config: Annotated[
        str | None, typer.Option(help="preprocessor_config.json, its folder, or kimi-k3. Default: beside the manifest.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Output folder, or s3://… Default: <manifest>-features.")
    ] = None,
    staging: Annotated[
        Path | None,
        typer.Option(help="Where shards for a URL are made. Default: in the temporary folder."),
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
    dedupe: Annotated[
        Literal["path", "content", "off"],
        typer.Option(help="Store an image once for all rows that name it; content: also under other names."),
    ] = "path",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of the manifest.")] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse images with more pixels.")] = 178_956_970,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Scale images down until none has more tokens. Default: as the config.")
    ] = None,
    exif: Annotated[
        Literal["ignore", "apply"], typer.Option(help="What to do with EXIF orientations: the checkpoint ignores them.")
    ] = "ignore",
    item_timeout: Annotated[
        float, typer.Option(min=0.001, help="Most seconds for reading and decoding one image; then it has failed.")
    ] = 300,
    image_root: Annotated[
        Path | None, typer.Option(help="Refuse a manifest that names files outside this folder, or URLs.")
    ] = None,
    on_error: Annotated[
        Literal["record", "fail"], typer.Option(help="Record a failed item and go on, or stop the run.")
    ] = "record",
    max_failures: Annotated[int | None, typer.Option(min=0, help="Stop above this many failed items.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in a folder that holds a run.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try the failed items of the run again, and rewrite their shards.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan; write nothing.")] = False,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
    format: Format = "text",
) -> None:
    """Encode a manifest of images into shards of pixel features."""
    from kimik3_prep import terminal

    with _exit_codes(format):
        from kimik3_prep import check  # inside: these imports take a second, in which Ctrl-C may be pressed
        from kimik3_prep import prepare as run
        from kimik3_prep.plan import parse_size

        folder, store = check.destination(output, staging, manifest)
        settings = check.Settings(
            manifest=manifest,
            output=folder,
            store=store,
            config=config,
            backend=backend,
            dtype=dtype,
            device=device,
            batch_bytes=parse_size(batch_bytes, "--batch-bytes"),
            shard_size=parse_size(shard_size, "--shard-size"),
            workers=workers or check.default_workers(),
            dedupe=dedupe,
            max_tokens=max_tokens,
            exif=exif,
            limit=limit,
            max_pixels=max_pixels,
            item_timeout=item_timeout,
            on_error=on_error,
            max_failures=max_failures,
            overwrite=overwrite,
            retry_failed=retry_failed,
            image_root=image_root,
        )
        with terminal.ProgressReporter(progress) as reporter:
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
    render: Annotated[
        Path | None, typer.Option(help="Write items of a finished output folder as PNG pictures into this folder.")
    ] = None,
    id: Annotated[list[str] | None, typer.Option(help="An item to render; may be repeated.")] = None,
    first: Annotated[int, typer.Option(min=1, help="How many items to render where no --id is given.")] = 20,
    format: Format = "text",
) -> None:
    """Show what lies in a shard, an index or an output folder."""
    from kimik3_prep import findings, inspection, pictures, terminal

    with _exit_codes(format):
        if id and render is None:
            raise InputError([Problem("--id", "chooses what to render", hint="add --render FOLDER")])
        drawn = pictures.render(path, render, id or (), first) if render else []
        found = inspection.inspect(path)
        if format == "json":
            terminal.print_json(found | ({"pictures": [asdict(picture) for picture in drawn]} if render else {}))
        else:
            findings.print_inspection(found)
            for picture in drawn:
                terminal.out.print(str(picture))


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="An output folder.")],
    against_source: Annotated[
        bool, typer.Option("--against-source", help="Also compute features from the images again, and compare bytes.")
    ] = False,
    processor: Annotated[
        Path | None, typer.Option(help="Also compare with the image processor in this checkpoint folder.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow --processor to run the code in its folder.")
    ] = False,
    manifest: Annotated[
        str | None,
        typer.Option(help="The manifest that was encoded: relative image paths start beside it."),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Compare only so many stored images, evenly spread. Default: all.")
    ] = None,
    format: Format = "text",
) -> None:
    """Prove that an output folder holds what its run says; exit 1 where it does not."""
    from kimik3_prep import findings, terminal

    with _exit_codes(format):
        from kimik3_prep import recompute
        from kimik3_prep import verify as proof

        code = recompute.processor_folder(processor, trust_remote_code)
        report = proof.verify(path)
        if against_source or code is not None:
            report |= recompute.against_source(path, manifest, sample, against_source, code)
            report["problems"] += report.pop("differences")
        terminal.print_json(report) if format == "json" else findings.print_verification(report)
        raise typer.Exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()
