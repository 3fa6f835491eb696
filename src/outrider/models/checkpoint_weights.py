"""A checkpoint's weights, whole or this process's part, and what is wrong with one in words."""

from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NoReturn

from transformers import PreTrainedModel

from outrider.errors import ConfigurationError, RemoteCodeRefused, UnsupportedModel
from outrider.models import pretrained
from outrider.models.auto_classes import auto_class
from outrider.models.foreign_errors import first_line, kind_of, pickled

if TYPE_CHECKING:
    from outrider.models.sources import ModelSource


def read(source: "ModelSource", **how: Any) -> PreTrainedModel:
    """The model with all of its weights from the checkpoint, its adapter merged.

    Raises ConfigurationError for files that are broken, weights that are not there or of another
    size, and packages that are not installed.
    """
    kind = auto_class(source.config)
    more = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # told below
    try:
        model, told = pretrained.read_model(kind, source.where, source.trust, **more, **how)
    except UnpicklingError as error:
        _refuse(source, pickled(error), error)
    except (UnsupportedModel, RemoteCodeRefused):
        raise
    except ImportError as error:
        if source.quantised_by is None:
            raise ConfigurationError(
                f"the {source.role} model needs a package that is not installed "
                f"({first_line(error)}); got {str(source.given)!r}; install it"
            ) from error
        raise ConfigurationError(
            f"the weights of the {source.role} model are quantised by {source.quantised_by!r}, "
            f"which needs a package that is not installed ({first_line(error)}); got "
            f"{str(source.given)!r}; install it, or give the checkpoint that they were made of"
        ) from error
    except Exception as error:  # a broken file, or sizes in config.json that make no model
        if how.get("distributed_config") is not None and isinstance(error, ValueError):
            raise  # said by who asked for it
        _refuse(source, kind_of(error), error)
    wrong = sorted([*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])])
    if wrong:
        _refuse(source, f"{len(wrong)} of them are not there, or of another size: {wrong[0]}")
    loaded: PreTrainedModel = model
    return loaded if source.adapter is None else source.adapter.merged(loaded, source.role)


def read_part(source: "ModelSource", **how: Any) -> PreTrainedModel:
    """This process's part of the model, by the plan that transformers has for its family.

    Raises UnsupportedModel for a family that has none for this number of processes.
    """
    from transformers.distributed import DistributedConfig

    try:
        plan = DistributedConfig(tp_size=source.shards, tp_plan="auto")
        return read(source, distributed_config=plan, **how)
    except ValueError as error:
        raise UnsupportedModel(
            f"{source.config.model_type!r} cannot be cut for {source.shards} processes "
            f"({first_line(error)}); got {source}; use another number of processes, or another "
            "model"
        ) from error


def _refuse(source: "ModelSource", why: str, error: Exception | None = None) -> NoReturn:
    raise ConfigurationError(
        f"cannot read the weights of the {source.role} model; got {str(source.given)!r} ({why}); "
        "download it again, or save it whole"
    ) from error
