"""``edgectl build``: TensorRT engines, before the daemon needs them."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edged.cli.exit_codes import ExitCode, exit_code_of
from edged.cli.options import ModelOption
from edged.cli.progress import ProgressBars
from edged.cli.terminal import say_error
from edged.config import AttentionConfig, Config, ModelConfig
from edged.config_reader import read_config
from edged.errors import CheckpointError, ConfigError, EdgedError, InvalidArgumentError
from edged.units import format_size

_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class _Result:
    """One engine."""

    model: str
    built: bool
    folder: Path
    manifest: Any  # edged.engine.manifest.Manifest, which is imported late


def command(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL_FOLDER", help="A model folder, instead of --config.", show_default=False
        ),
    ] = None,
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-f",
            metavar="FILE",
            help="Build for the models of this configuration that run on TensorRT, as the daemon will.",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = "",
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            "-t",
            metavar="SM",
            help="Compute capability to build for, such as sm89; may be given several times. This machine's GPU "
            "otherwise. Any other is built with TensorRT-RTX, without a GPU.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", "-d", metavar="DTYPE", help="bfloat16 or float16.")
    ] = "bfloat16",
    attention: Annotated[
        str,
        typer.Option(
            "--attention", metavar="MODE", help="auto (the model's sparse_config), dense or sparse."
        ),
    ] = "auto",
    prefill_chunk: Annotated[
        int, typer.Option("--prefill-chunk", metavar="N", help="Most prompt tokens in one step.")
    ] = 512,
    max_sequences: Annotated[
        int, typer.Option("--max-sequences", metavar="N", help="Requests that share steps.")
    ] = 1,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            help="Where engines are kept.",
            show_default="$EDGED_CACHE/engines, else ~/.cache/edged/engines",
        ),
    ] = None,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit",
            help="Build, on the machine whose GPU will run it, a plan whose dense products have constant weights, which are "
            "left out of it and put in from the checkpoint when the daemon loads it. The daemon takes such an engine where "
            "there is one.",
            show_default=False,
        ),
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build also where there is an engine.", show_default=False)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", show_default=False)
    ] = False,
) -> int:
    """Build the TensorRT engine of a model; it takes seconds, for it holds no weights.

    An engine that is there already is not built again. A build that fails or is stopped leaves nothing behind.
    """
    if (config is None) == (folder is None):
        raise typer.BadParameter(
            "give either a model folder or --config FILE", param_hint="'MODEL_FOLDER' / '--config'"
        )
    try:
        if config is not None:
            models = _models_of(read_config(config.expanduser()), model)
        else:
            models = (_model_of(folder, dtype, attention, prefill_chunk, max_sequences),)
        results = [_build(each, target or [], cache, refit=refit, rebuild=rebuild) for each in models]
    except (CheckpointError, ConfigError) as error:
        say_error(error.message)
        return exit_code_of(error)
    except InvalidArgumentError as error:
        raise typer.BadParameter(error.message, param_hint=f"'--{error.field.replace('_', '-')}'") from None
    except EdgedError as error:
        say_error(error.message)
        return ExitCode.NO
    _print(results, as_json=as_json)
    return ExitCode.DONE


def _models_of(config: Config, name: str) -> tuple[ModelConfig, ...]:
    """The models to build for.

    Raises:
        ConfigError: None runs on TensorRT, or there is none of that name.
    """
    if name:
        chosen = tuple(each for each in config.models if each.name == name)
        if not chosen:
            names = ", ".join(each.name for each in config.models)
            raise ConfigError(
                f"there is no model {name!r} in the configuration; it has {names}", field="models"
            )
        return chosen
    chosen = tuple(each for each in config.models if each.executor == "tensorrt")
    if not chosen:
        raise ConfigError(
            "no model of the configuration has executor: tensorrt; name one with --model", field="models"
        )
    return chosen


def _model_of(
    folder: Path | None, dtype: str, attention: str, prefill_chunk: int, max_sequences: int
) -> ModelConfig:
    for value, choices, option in (
        (dtype, _DTYPES, "--dtype"),
        (attention, ("auto", "dense", "sparse"), "--attention"),
    ):
        if value not in choices:
            raise typer.BadParameter(
                f"{value!r} is not one of {', '.join(choices)}", param_hint=f"'{option}'"
            )
    path = (folder or Path()).expanduser()
    return ModelConfig(
        name=path.resolve().name,
        path=path,
        executor="tensorrt",
        device="cuda",
        dtype=dtype,
        prefill_chunk=prefill_chunk,
        max_sequences=max_sequences,
        attention=AttentionConfig(mode=attention),
    )


def _build(
    model: ModelConfig, targets: list[str], cache: Path | None, *, refit: bool, rebuild: bool
) -> _Result:
    # onnx and numpy take a while to import; nothing above needs them.
    from edged.engine.provision import provide_model  # noqa: PLC0415
    from edged.engine.store import EngineStore, default_folder  # noqa: PLC0415
    from edged.engine.targets import parse_targets  # noqa: PLC0415

    store = EngineStore(default_folder() if cache is None else cache.expanduser())
    with ProgressBars(f"engine of {model.name}") as bars:
        engine, built = provide_model(
            model,
            store,
            targets=parse_targets(targets),
            refitted=refit,
            rebuild=rebuild,
            progress=bars.report,
        )
    return _Result(model.name, built, engine.folder, engine.manifest)


def _print(results: list[_Result], *, as_json: bool) -> None:
    if as_json:
        engines = [
            {
                "model": each.model,
                "built": each.built,
                "folder": str(each.folder),
                "key": each.manifest.key.to_json(),
                "plan_bytes": each.manifest.plan_bytes,
                "refitted": each.manifest.refitted,
                "activation_bytes": dict(each.manifest.activation_bytes),
                "build_seconds": each.manifest.build_seconds,
            }
            for each in results
        ]
        sys.stdout.write(json.dumps({"engines": engines}, indent=2) + "\n")
        return
    for each in results:
        manifest, key = each.manifest, each.manifest.key
        verb = f"built in {manifest.build_seconds:.1f} s" if each.built else "found, nothing to build"
        context = manifest.context_bytes
        memory = "" if context is None else f", {format_size(context)} of device memory for activations"
        sys.stdout.write(
            f"{each.model}: {verb}: {key.targets}, {key.dtype}, {key.tensorrt}; {'stripped ' * manifest.refitted}plan "
            f"{format_size(manifest.plan_bytes)}{memory}\n{each.folder}\n"
        )
