"""The command line: parse, call one function, print, exit code. No logic.

Heavy modules are imported inside the commands, so that `--help` and `validate-config` start without them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from kimik3_prep import __version__
from kimik3_prep.errors import InputError, Problem
from kimik3_prep.screen import answers
from kimik3_prep.screen.process import Commands, run_command

app = typer.Typer(
    name="kimik3-prep",
    cls=Commands,
    help="Prepare images for Kimi-K3 once, offline and exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MOST = 2**63 - 1  # what counts of the libraries hold

Format = Annotated[Literal["text", "json"], typer.Option(help="JSON goes to stdout, progress and prose to stderr.")]


ImageDir = Annotated[
    str | None, typer.Option(help="Where relative paths in rows start. Default: the source's folder.", metavar="DIR")
]
ImageField = Annotated[
    list[str] | None,
    typer.Option(help="Field of the images, also `messages[*].image`; repeatable. Default: what looks like one."),
]
IdField = Annotated[
    list[str] | None, typer.Option(help="Field of the ids; several are joined. Default: id, key, else the image.")
]
NumberRows = Annotated[bool, typer.Option("--number-rows", help="Row numbers from 0 as ids.")]


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
    configs: Annotated[
        list[str] | None,
        typer.Argument(help="preprocessor_config.json files, checkpoint folders, or kimi-k3 for the published one."),
    ] = None,
    write_fixed: Annotated[
        Path | None, typer.Option(help="Write a copy with misspelt keys renamed and missing ones as published.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Settings that are not as published are errors.")] = False,
    format: Format = "text",
) -> None:
    """Say everything a preprocessor config means, and everything that is wrong with it."""
    from kimik3_prep.checkpoint.config import diagnose_all, report_all
    from kimik3_prep.checkpoint.mend import write_fixed_copy

    diagnoses = diagnose_all(configs or [None], strict)
    if write_fixed is not None and len(diagnoses) > 1:
        raise InputError([Problem("--write-fixed", "writes a copy of one config", hint="name one file")])
    mended = write_fixed_copy(diagnoses[0], write_fixed) if write_fixed is not None else None
    answers.give(report_all(diagnoses, mended), format)
    raise typer.Exit(0 if all(diagnosis.config is not None for diagnosis in diagnoses) else 2)


@app.command()
def manifest(
    source: Annotated[
        str,
        typer.Argument(help="A folder, rows (JSON, CSV, Parquet, Arrow), a tar, a pattern for several; - is stdin."),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A new file. Default: standard output.")] = None,
    image_dir: ImageDir = None,
    image_field: ImageField = None,
    id_field: IdField = None,
    number_rows: NumberRows = False,
    absolute: Annotated[bool, typer.Option("--absolute", help="Write absolute paths.")] = False,
    size: Annotated[bool, typer.Option("--size", help="Read the headers, and write width and height.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
    format: Format = "text",
) -> None:
    """Make a manifest of a folder of images, or of a list whose rows name images."""
    from kimik3_prep.manifest.row import Selection
    from kimik3_prep.manifest.write import Wishes, gather
    from kimik3_prep.screen.terminal import print_lines

    if format == "json" and output is None:
        raise InputError([Problem("--format json", "standard output is the manifest's", hint="add --output FILE")])
    select = Selection(tuple(image_field or ()), tuple(id_field or ()), number_rows)
    gathered, lines = gather(Wishes(source, output, image_dir, select, absolute, size, overwrite))
    if output is None:
        print_lines(lines)
    answers.give(gathered, format)


@app.command()
def encode(
    manifest: Annotated[
        str,
        typer.Argument(help="A folder, rows (JSON, CSV, Parquet, Arrow), a tar, a pattern for several; - is stdin."),
    ],
    config: Annotated[
        str | None, typer.Option(help="preprocessor_config.json, its folder, or kimi-k3. Default: beside the manifest.")
    ] = None,
    image_dir: ImageDir = None,
    image_field: ImageField = None,
    id_field: IdField = None,
    number_rows: NumberRows = False,
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
        int | None,
        typer.Option("--workers", "-j", min=1, max=1024, help="Worker processes. Default: one a processor."),
    ] = None,
    engine: Annotated[Literal["local", "ray"], typer.Option(help="Fill shards on this machine, or as Ray tasks.")] = (
        "local"
    ),
    ray_address: Annotated[
        str | None,
        typer.Option(help="auto, host:port or ray://host:port. Default: $RAY_ADDRESS, else a Ray is started here."),
    ] = None,
    shard_range: Annotated[
        str | None,
        typer.Option(help="Only every n-th shard, as i/n with i from 1 to n; then `finish` writes the index."),
    ] = None,
    dedupe: Annotated[
        Literal["path", "content", "off"],
        typer.Option(help="Store an image once for all rows that name it; content: also under other names."),
    ] = "path",
    limit: Annotated[int | None, typer.Option(min=1, max=_MOST, help="Only the first rows of the manifest.")] = None,
    max_pixels: Annotated[int, typer.Option(min=1, max=_MOST, help="Refuse images with more pixels.")] = 178_956_970,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST, help="Most tokens of an image: larger ones are scaled down."),
    ] = None,
    exif: Annotated[
        Literal["ignore", "apply"], typer.Option(help="What to do with EXIF orientations: the checkpoint ignores them.")
    ] = "ignore",
    formats: Annotated[
        str, typer.Option(help="Read +heif or +jxl (+heif,+jxl) as well, each with the extra of its name.")
    ] = "",
    item_timeout: Annotated[
        float, typer.Option(min=0.001, help="Most seconds for reading and decoding one image; then it has failed.")
    ] = 300,
    memory: Annotated[
        str | None, typer.Option(help="Most bytes of decoded images at a time. Default: half of what is free.")
    ] = None,
    image_root: Annotated[
        Path | None, typer.Option(help="Refuse a manifest that names files outside this folder, or URLs.")
    ] = None,
    since: Annotated[
        Path | None, typer.Option(help="A finished output: prepare only what it does not hold, by id and content.")
    ] = None,
    on_missing: Annotated[
        Literal["stop", "record"], typer.Option(help="Where none of the first files is there: stop, or go on.")
    ] = "stop",
    on_error: Annotated[
        Literal["record", "fail"], typer.Option(help="Record a failed item and go on, or stop the run.")
    ] = "record",
    max_failures: Annotated[
        int | None, typer.Option(min=0, max=_MOST, help="Stop the run when more items have failed. Default: never.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in a folder that holds a run.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try the failed items of the run again, and rewrite their shards.")
    ] = False,
    index_only: Annotated[
        bool, typer.Option("--index-only", help="Write the index of grids and tokens without decoding any pixels.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan; write nothing.")] = False,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
    format: Format = "text",
) -> None:
    """Encode a manifest of images into shards of pixel features."""
    from kimik3_prep.images.formats import parse_formats
    from kimik3_prep.manifest.row import Selection
    from kimik3_prep.run import check
    from kimik3_prep.run import prepare as run
    from kimik3_prep.run.machine import processors
    from kimik3_prep.screen.progress import ProgressReporter

    settings = check.Settings(
        manifest=manifest,
        output=output or check.default_output(manifest),
        staging=staging,
        config=config,
        backend=backend,
        dtype=dtype,
        device=device,
        batch_bytes=check.parse_size(batch_bytes, "--batch-bytes"),
        shard_size=check.parse_size(shard_size, "--shard-size"),
        workers=workers or processors(),
        dedupe=dedupe,
        max_tokens=max_tokens,
        exif=exif,
        formats=parse_formats(formats),
        select=Selection(tuple(image_field or ()), tuple(id_field or ()), number_rows, parse_formats(formats)),
        image_dir=image_dir,
        on_missing=on_missing,
        since=since,
        limit=limit,
        max_pixels=max_pixels,
        memory=check.parse_size(memory, "--memory") if memory else None,
        item_timeout=item_timeout,
        on_error=on_error,
        max_failures=max_failures,
        overwrite=overwrite,
        retry_failed=retry_failed,
        image_root=image_root,
        index_only=index_only,
        engine=engine,
        ray_address=ray_address,
        shard_range=None if shard_range is None else check.parse_range(shard_range),
    )
    work = run.dry_run if dry_run else run.prepare_range if settings.shard_range else run.prepare
    with ProgressReporter(progress) as reporter:
        summary = work(settings, reporter)
    answers.give(replace(summary, warnings=tuple(reporter.warnings), passed_over=reporter.passed_over), format)
    raise typer.Exit(1 if summary.failed else 0)


@app.command()
def finish(
    path: Annotated[Path, typer.Argument(help="An output folder that `encode --shard-range` filled.")],
    format: Format = "text",
) -> None:
    """Write the final index, once all ranges of a run have filled their shards."""
    from kimik3_prep.run import prepare as run
    from kimik3_prep.screen.progress import ProgressReporter

    with ProgressReporter(False) as reporter:
        summary = run.finish(path, reporter)
    answers.give(replace(summary, warnings=tuple(reporter.warnings), passed_over=reporter.passed_over), format)
    raise typer.Exit(1 if summary.failed else 0)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A shard, an index or an output folder, or the URL of one.")],
    render: Annotated[
        Path | None,
        typer.Option(help="Write PNG files into this folder: a picture of each item, or contact sheets of a shard."),
    ] = None,
    sheets: Annotated[
        bool, typer.Option("--sheets", help="Render contact sheets of a run, twenty items on each, failed ones too.")
    ] = False,
    id: Annotated[list[str] | None, typer.Option(help="An item to render. May be repeated.")] = None,
    first: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST, help="How many items to show. Default: 20; of a report 5,000."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write one HTML page of a finished run: each item's picture, size, tokens and error."),
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Draw lines between patches and tokens, and hatch the padding.")
    ] = False,
    format: Format = "text",
) -> None:
    """Show what lies in a shard, an index or an output folder."""
    from kimik3_prep.reading import inspection, pictures

    if render is None:
        for option, given in (("--id", id), ("--grid", grid), ("--sheets", sheets)):
            if given:
                raise InputError([Problem(option, "is about pictures", hint="add --render FOLDER")])
    drawn = tuple(pictures.render(path, render, id or (), first or 20, grid, sheets)) if render else None
    description = inspection.inspect(path, drawn)
    if report is not None:
        from kimik3_prep.reading.report import write_report

        if not isinstance(description, inspection.OutputDescription):
            raise InputError([Problem("--report", f"{path} is no output folder", "an output folder of a finished run")])
        description = replace(description, report=write_report(path, report, description, first))
    answers.give(description, format)


@app.command()
def verify(
    path: Annotated[str, typer.Argument(help="An output folder, or its URL.")],
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
        int | None,
        typer.Option(min=1, max=_MOST, help="Compare only so many stored images, evenly spread. Default: all."),
    ] = None,
    format: Format = "text",
) -> None:
    """Prove that an output folder holds what its run says; exit 1 where it does not."""
    from kimik3_prep.reading.verify import Comparison
    from kimik3_prep.reading.verify import verify as check_folder

    comparison = None
    if against_source or processor is not None:
        comparison = Comparison(manifest, sample, against_source, processor, trust_remote_code)
    report = check_folder(path, comparison)
    answers.give(report, format)
    raise typer.Exit(1 if report.problems else 0)


def main() -> None:
    """Entry point of the `kimik3-prep` command."""
    run_command(app)


if __name__ == "__main__":
    main()
