"""The chat templates of a model folder: found, bounded and compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateSyntaxError

from edged.checkpoint.template_budget import Budget, BudgetError, RenderLimits
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    import jinja2

    from edged.checkpoint.template_environment import TemplateEnvironment

TEMPLATE_FILE = "chat_template.jinja"
_NAMED_TEMPLATES = "additional_chat_templates"
_MAX_SOURCE_BYTES = 1 << 18  # the longest in use have some 30 KB
_MAX_NODES = 20_000  # of the syntax tree, where the longest in use have some 3000; compiling takes 50 us and 4 KB for each
_COMPILING = RenderLimits(seconds=10.0, steps=1_000_000, characters=1 << 20)


def read_sources(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """A model folder's templates by name.

    Args:
        folder: The model folder.
        settings: Its ``tokenizer_config.json``.

    Raises:
        CheckpointError: A template cannot be read, or there are some and none is named ``default``.
    """
    sources: dict[str, str] = {}
    stored = settings.get("chat_template")
    if isinstance(stored, str):
        sources["default"] = stored
    elif isinstance(stored, list):
        for entry in stored:
            if not isinstance(entry, dict) or not all(
                isinstance(entry.get(key), str) for key in ("name", "template")
            ):
                raise CheckpointError(
                    f"{folder}/tokenizer_config.json: chat_template must list names and templates"
                )
            sources[entry["name"]] = entry["template"]
    elif stored is not None:
        raise CheckpointError(f"{folder}/tokenizer_config.json: chat_template is neither a text nor a list")
    if (folder / TEMPLATE_FILE).exists():
        sources["default"] = _read_text(folder / TEMPLATE_FILE)
    for path in sorted((folder / _NAMED_TEMPLATES).glob("*.jinja")):
        sources[path.stem] = _read_text(path)
    if sources and "default" not in sources:
        raise CheckpointError(
            f"{folder}: has the chat templates {', '.join(sources)}, but none named default"
        )
    return sources


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size <= _MAX_SOURCE_BYTES:
            return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    raise CheckpointError(f"{path}: larger than {_MAX_SOURCE_BYTES >> 10} KiB")


class CompiledTemplate(NamedTuple):
    """A template, and what its source tells of it."""

    template: jinja2.Template
    constants: frozenset[str]  # every text that is spelled out in it
    variables: frozenset[str]  # every name that it reads and may not have set itself


def compile_template(environment: TemplateEnvironment, source: str, where: str) -> CompiledTemplate:
    """Compile one template, in bounded time.

    Args:
        environment: The sandbox that it runs in.
        source: Its text.
        where: Stands before messages about it.

    Raises:
        CheckpointError: It is too large, does not compile or reaches for other files.
    """
    if len(source) > _MAX_SOURCE_BYTES:
        raise CheckpointError(f"{where}: larger than {_MAX_SOURCE_BYTES >> 10} KiB")
    try:
        # Constant expressions are evaluated here, and what they make is kept.
        with Budget(_COMPILING):
            tree = environment.parse(source)
            reaching, constants = _survey(tree)
            variables = frozenset(meta.find_undeclared_variables(tree))
            template = environment.from_string(source)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"{where}: line {error.lineno}: {error.message}") from None
    except BudgetError as error:
        raise CheckpointError(f"{where}: cannot be compiled: {error}") from None
    except Exception as error:  # noqa: BLE001 - a hostile source fails in Python's compiler in many ways
        raise CheckpointError(f"{where}: does not compile: {error or type(error).__name__}") from None
    if reaching is not None:
        raise CheckpointError(f"{where}: line {reaching.lineno}: a chat template cannot use other files")
    return CompiledTemplate(template, constants, variables)


def _survey(tree: nodes.Template) -> tuple[nodes.Node | None, frozenset[str]]:
    """The first node that reaches for another file, and every text that is spelled out."""
    reaching: nodes.Node | None = None
    constants = set()
    for count, node in enumerate(tree.find_all(nodes.Node)):
        if count >= _MAX_NODES:
            raise BudgetError(f"it has more than {_MAX_NODES} nodes")
        if isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            reaching = reaching or node
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            constants.add(node.value)
    return reaching, frozenset(constants)
