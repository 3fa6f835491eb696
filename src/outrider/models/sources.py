"""Where models and tokenizers come from: paths, hub names or objects, read when they are needed."""

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider import arguments, shipped
from outrider.errors import (
    ConfigurationError,
    NumericalError,
    OutriderError,
    RemoteCodeRefused,
    UnsupportedModel,
    first_line,
    kind_of,
    usable_file,
)
from outrider.models import (
    SUPPORTED,
    TreeDecoder,
    adapt,
    auto_classes,
    foreign_layers,
    gguf,
    gguf_weights,
    linear,
    load_checks,
    peft_models,
    placement,
    pretrained,
    reads_more,
    unsupported,
    weight_only,
)
from outrider.models.auto_classes import auto_class
from outrider.models.calibrate import Setting
from outrider.models.config import found, pairs, read
from outrider.models.lora import LoraBank
from outrider.models.model_lock import uncompiled

if TYPE_CHECKING:
    from outrider.models.distributed import Group

_log = logging.getLogger("outrider.models")

Given: TypeAlias = str | Path | PreTrainedModel  #: a path, a hub name, a loaded model

#: Whether a draft model attends to the target's encoder states; "auto": if the encoders are equal.
ShareEncoder: TypeAlias = bool | Literal["auto"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelSource:
    """A model by path, hub name or object: config first, weights when they are needed.

    `trust`: Python files of the model's folder may run (models/pretrained.py). A target, or a
    `DraftSource`: one of whole models.
    """

    takes_int8 = True
    stands_alone = True
    draft_dtype: str | None = None

    def __init__(
        self, given: Given, role: str, group: "Group | None" = None, trust: bool = False
    ) -> None:
        given = arguments.at_home(given)
        self.given, self.role, self.trust = given, role, pretrained.read_trust(trust)
        if trust and isinstance(given, (str, Path)):
            pretrained.warn(str(given))
        self.group = group  #: the processes that have a part each; None: this one has it all
        self.shards = 1 if group is None else group.size
        self.files: Given = given  #: what weights and settings are read from: an adapter's base
        self.adapter: peft_models.AdapterFolder | None = None  #: what is merged into them
        self._models: dict[str, PreTrainedModel] = {}  # by dtype, as transformers has them
        self._running: dict[str, PreTrainedModel] = {}  # where weights have a type of their own
        self.widened: str | None = None  #: which blocks of a GGUF file could not be kept, in words
        self._lora: Mapping[str, str | Path] = {}  # adapters that rows may have, by name
        self._bank: LoraBank | None = None
        self._chain_only: bool | None = None  # unknown until the first check
        self._shares: bool | None = None  # unknown until the weights are compared
        self.config: PretrainedConfig
        if not isinstance(given, (str, Path)):
            unsupported.check_loaded(given, role, "a path, a hub name or a loaded model")
            self.given = given = peft_models.unwrapped(uncompiled(given))
            self.config = given.config
            if given.dtype == torch.float64:
                raise ConfigurationError(
                    f"the {role} model was passed as an object in torch.float64, which nothing "
                    f"here computes in; got {self}; convert it: model.float()"
                )
            self._check_whole()
            return
        self.adapter = peft_models.adapter_folder(given, role)
        if self.adapter is not None:  # what is said of its base is said of it
            self._check_whole()
            self.files = given = self.adapter.base
        self._where, self._how = gguf.locate(given)
        if self._how:
            self._check_whole()
        try:
            self.config = self._configuration()
        except RemoteCodeRefused:
            raise
        except Exception as error:  # whatever somebody else's file makes transformers raise
            unsupported.check_files(Path(given), role)
            kind = "no local folder with a config.json and no hub name that can be reached"
            why, do = kind_of(error), "check the path or download the model first"
            if self._how:
                kind = "no GGUF file that can be read"
                if Path(given).is_file():
                    why, do = f"cut or damaged: {why}", "download it again"
                elif Path(self._where).is_dir():  # what transformers says of it is of the hub
                    why = "it is a folder" if Path(given).is_dir() else "there is no such file"
            elif (Path(given) / "config.json").is_file():
                kind = "a folder whose config.json cannot be used"
            said = repr(str(given))
            if self.adapter is not None:
                said = f"{said}, the base of the adapter {str(self.adapter.folder)!r}"
            close = get_close_matches(str(given), shipped.DRAFTS, n=1)
            meant = f". Did you mean {close[0]!r}?" if close and self.role == "draft" else ""
            raise ConfigurationError(
                f"cannot load the {role} model; got {said}, which is {kind} ({why}); {do}{meant}"
            ) from error
        auto_class(self.config)  # refuses what is no language model

    def _configuration(self) -> PretrainedConfig:
        known = gguf.cache_folder(self.files)
        config: PretrainedConfig | None = None
        if known is not None:
            with suppress(OSError, ValueError):
                config = pretrained.read_config(str(known / "config"), self.trust)
        if config is None:
            config = pretrained.read_config(self._where, self.trust, **self._how)
            gguf.remember(self.files, config, "config")
        if self._how and read(config, "num_experts", int) is not None:
            gguf.read_widths(config, self.stored())
        return config

    def serve(self, lora: Mapping[str, str | Path]) -> None:
        """Let rows have adapters of these folders, by name; they are read with the weights.

        Raises ConfigurationError for names that are none, UnsupportedModel for a target that reads
        more than text or is cut for several processes.
        """
        for name, folder in lora.items():
            if not (isinstance(name, str) and name and isinstance(folder, (str, Path))):
                do = "write lora_modules={'name': 'path/to/adapter'}"
                arguments.refuse("lora_modules", "folders of adapters by name", lora, do)
        if lora and (reads_more(self.config) or self.shards > 1):
            kind = "is cut for several processes" if self.shards > 1 else "reads more than text"
            raise UnsupportedModel(
                f"adapters by row are for targets of text alone in one process; got {self}, which "
                f"{kind}, with lora_modules; give one adapter as the target: it is merged"
            )
        self._lora = dict(lora)

    def shares(
        self, target: "ModelSource", wish: ShareEncoder, dtype: str, place: torch.device
    ) -> bool:
        """Whether this draft model attends to the states of the target's encoder.

        Raises ConfigurationError for a wish that cannot be had.
        """
        if unsupported.reads_states(self.config):
            return True
        both = pairs(self.config) and pairs(target.config)
        if wish is False or (wish == "auto" and not both):
            return False
        if not both:
            raise ConfigurationError(
                "share_encoder=True is for a target and a draft model with encoders; got "
                f"{target} and {self}; leave it out"
            )
        if wish is True:
            unsupported.check_widths(target.config, self.config)
            return True
        if self._shares is None:
            models = target.model(dtype, place), self.model(dtype, place)
            self._shares = load_checks.same_encoder(*models)
        return self._shares

    def driven(
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = False
    ) -> TreeDecoder:
        """The model behind its runner, checked once against its own forward.

        An architecture that is not listed and does not score trees falls back to chains. A draft
        that `shares` attends to the states of the target's encoder.
        """
        loaded = self.model(setting.dtype, device)
        foreign_layers.unpack(loaded)
        try:
            return self._checked(loaded, setting, vocab, shares)
        except NumericalError as error:
            raise self.not_numbers(error, setting.dtype, device) from error
        except UnsupportedModel as error:
            if self.quantised_by is None or setting.dtype == self.checkpoint_dtype():
                raise
            raise ConfigurationError(
                f"the weights of {self} are quantised by {self.quantised_by!r} for states in "
                f"{self.checkpoint_dtype()}; got dtype={setting.dtype!r}, in which its layers do "
                f"not run ({first_line(error)}); leave dtype out"
            ) from error
        except OutriderError:
            raise
        except Exception as error:  # sizes that fit the weights, and not each other
            raise ConfigurationError(
                f"the {self.role} model does not run as its config.json says; got {str(self)!r} "
                f"({kind_of(error)}); check its sizes, or download it again"
            ) from error

    def not_numbers(
        self, error: NumericalError, dtype: str, device: torch.device
    ) -> NumericalError:
        loaded = self.model(dtype, device)
        bad = [name for name, w in loaded.named_parameters() if not bool(w.isfinite().all())]
        where = f"{len(bad)} of its weights have NaN or infinity, first {bad[0]}" if bad else ""
        where = where or "its weights are finite: look at rms_norm_eps and the like in config.json"
        return NumericalError(
            f"the {self.role} model's scores are no numbers ({error}); got {str(self)!r}: {where}; "
            "download it again, or use another dtype"
        )

    def _checked(
        self, loaded: PreTrainedModel, setting: Setting, vocab: int, shares: bool
    ) -> TreeDecoder:
        """The model behind its runner, checked the first time."""

        if self._lora and self._bank is None:
            self._bank = LoraBank(loaded)
        bank = self._bank

        def made(chain_only: bool) -> TreeDecoder:
            return adapt(
                loaded,
                packed=setting.packed,
                vocab_size=vocab,
                chain_only=chain_only,
                shares=shares,
                int8=self.role == "draft" and setting.draft_dtype == "int8",
                bank=bank,
            )

        if self._chain_only is None:
            model, self._chain_only = made(False), False
            try:
                load_checks.paths(model, self.role)
            except UnsupportedModel:
                known = self.config.model_type in SUPPORTED or reads_more(self.config)
                if known or not model.trees:
                    raise
                model, self._chain_only = made(True), True
                load_checks.paths(model, self.role)
            self._read_adapters(model)
            return model
        return made(self._chain_only)

    def _read_adapters(self, model: TreeDecoder) -> None:
        """Read the adapters that rows may have, and check that rows with them run side by side."""
        if self._bank is None:
            return
        for name, folder in self._lora.items():
            self._bank.add(name, folder)
        load_checks.adapters(model, self.role)

    def __str__(self) -> str:
        return str(self.given) if isinstance(self.given, (str, Path)) else type(self.given).__name__

    def loaded_dtype(self) -> str | None:
        """The dtype of a model object that was passed in."""
        if isinstance(self.given, (str, Path)):
            return None
        return str(self.given.dtype).removeprefix("torch.")

    def loaded_device(self) -> torch.device | None:
        """The device of a model object that was passed in."""
        if isinstance(self.given, (str, Path)):
            return None
        return placement.device_of(self.given)

    def checkpoint_dtype(self) -> str:
        """The dtype the checkpoint was saved in."""
        saved = str(self.config.dtype).removeprefix("torch.")
        return saved if saved in DTYPES else "float32"  # float64, too

    @property
    def in_blocks(self) -> bool:
        """Whether it is a GGUF file, whose weights can stay in its blocks."""
        return self.adapter is None and gguf.is_file(self.given)

    def stored(self) -> gguf.GgufFile:
        """The tensors of a GGUF file. Raises ConfigurationError for a damaged one."""
        return gguf.open_file(self._where, self._how)

    @cached_property
    def stored_types(self) -> str:
        """Of a GGUF file how many tensors have which type, "" of anything else: what a step costs
        depends on it, and nothing of it is in the configuration."""
        if not self.in_blocks:
            return ""
        return repr(sorted(Counter(each.kind for each in self.stored().tensors.values()).items()))

    @property
    def quantised_by(self) -> str | None:
        """The library or method that a checkpoint's weights were quantised by; None: they are
        whole, or a GGUF file's."""
        settings = read(self.config, "quantization_config", object)
        if settings is None:
            return None
        said = settings if isinstance(settings, dict) else vars(settings)
        method = said.get("quant_method", "an unnamed method")
        return str(found(method, "value") or method)

    def keeps(self, dtype: str, device: torch.device) -> bool:
        """Whether weights of this type are packed, beside states in float32 (`weight_only`).

        Not those that another library has quantised, whose layers compute as it wants, nor the
        part of a weight that one of several processes has. Raises ConfigurationError where they
        would have to be quantised once more.
        """
        foreign = self.quantised_by is not None
        if foreign and dtype in weight_only.QUANTISED:
            raise ConfigurationError(
                f"the weights of {self} are quantised already, by its quantization_config; got "
                f"dtype={dtype!r}; leave dtype out, or give the checkpoint that it was made of"
            )
        fetched = placement.offloaded(self.given)
        if fetched and dtype in weight_only.QUANTISED:
            raise ConfigurationError(
                f"weights that a device_map has fetched for each call stay as they are; got {self} "
                f"with dtype={dtype!r}; leave dtype out, or load it without device_map"
            )
        whole = self.shards == 1 and not foreign and not fetched
        return whole and weight_only.applies_to(dtype, device)

    def model(self, dtype: str, device: torch.device) -> PreTrainedModel:
        """The transformers model with weights of this type, as it runs (`weight_only`)."""
        if not self.keeps(dtype, device):
            return self.dense(dtype, device)
        if dtype not in self._running:
            self._running[dtype] = self._kept(dtype, device)
        return self._running[dtype]

    def _kept(self, dtype: str, device: torch.device) -> PreTrainedModel:
        """The model whose linear layers keep weights of this type, beside states in float32."""
        if self.in_blocks and dtype == weight_only.STORED:
            made, dtype = None, "float16"  # what it is unpacked to, if its blocks cannot be kept
            try:
                kind = auto_class(self.config)
                made, self.widened = gguf_weights.block_weights(self.stored(), self.config, kind)
            except UnsupportedModel as error:
                self.widened = str(error)
            if self.widened:
                _log.warning("%s: %s", self, self.widened)
            if made is not None:
                return made
        if isinstance(self.given, (str, Path)):
            numbers = self.checkpoint_dtype() if dtype not in DTYPES else dtype
            model = self._read(numbers, device)
        else:
            model = linear.beside(self._as_given(self.given, dtype))
        read = isinstance(self.given, (str, Path)) and self.adapter is None
        weight_only.keep(model, dtype, f"the {self.role} model {self}", read)
        return model

    def dense(self, dtype: str, device: torch.device) -> PreTrainedModel:
        """The transformers model in this dtype, weights and all, as it can be trained."""
        if not isinstance(self.given, (str, Path)):
            return self._as_given(self.given, dtype)
        if dtype not in self._models:
            self._models[dtype] = self._read(dtype, device)
        return self._models[dtype]

    def _as_given(self, model: PreTrainedModel, dtype: str) -> PreTrainedModel:
        """A loaded model, whose dtype stays: ConfigurationError for another one."""
        if dtype in DTYPES and model.dtype != DTYPES[dtype]:
            raise ConfigurationError(
                f"the {self.role} model was passed as an object in {model.dtype}; got "
                f"dtype={dtype!r}; convert it yourself or pass its path"
            )
        return model

    def _read(self, dtype: str, device: torch.device) -> PreTrainedModel:
        from transformers.utils import logging

        logging.disable_progress_bar()
        how = {"dtype": DTYPES[dtype], **self._how}
        if self._how:
            how |= {"config": self.config, **gguf.dequantize_options()}
            made = auto_classes.read_weights(self, **how).to(device)
            vars(made.config).pop("quantization_config", None)  # its weights are numbers now
            return made
        if self.group is not None:
            return auto_classes.read_part(self, **how)
        return auto_classes.read_weights(self, **how).to(device)

    @property
    def where(self) -> str:
        """The path or hub name that transformers reads: of a GGUF file, its folder."""
        return self._where

    def _check_whole(self) -> None:
        """Refuse to cut a model that is loaded already: ConfigurationError."""
        if self.shards > 1:
            raise ConfigurationError(
                f"tensor_parallel={self.shards} reads a part of the weights in each process, from "
                f"safetensors; got {self}; give the path or hub name of such a model"
            )

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer beside the weights, or None."""
        if not isinstance(self.given, (str, Path)):
            return None
        return pretrained.tokenizer_beside(self._words, self.role, self.trust)

    @property
    def _words(self) -> str | Path:
        """Where a tokenizer is looked for: in an adapter's folder, if it has one of its own."""
        assert isinstance(self.files, (str, Path))
        folder = None if self.adapter is None else self.adapter.folder
        if folder is not None and pretrained.tokenizer_files(folder):
            return folder
        return self.files

    def settings(self) -> dict[str, Any]:
        """The generation configuration, or what the model's own says instead of one."""
        from transformers import GenerationConfig

        settings: PretrainedConfig | GenerationConfig = self.config
        if gguf.is_file(self.files):
            pass  # a file beside it may be another model's
        elif isinstance(self.given, (str, Path)):
            with usable_file(str(self), "generation_config.json"):
                try:
                    settings = pretrained.read_generation_config(str(self.files))
                except OSError:
                    if (Path(self.files) / "generation_config.json").is_file():
                        raise  # it is there, and broken
        else:  # models that cannot generate by themselves have none
            settings = read(self.given, "generation_config", GenerationConfig) or self.config
        said: dict[str, Any] = settings.to_dict()
        if self.config.model_type == "blip":  # its own `generate` begins and ends texts by these
            text = self.config.text_config
            said |= {"decoder_start_token_id": text.bos_token_id, "eos_token_id": text.sep_token_id}
        return said

    def eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the generation configuration. Raises ConfigurationError."""
        ids = self.settings().get("eos_token_id")
        if ids is None:
            return ()
        with usable_file(str(self), "generation_config.json"):
            return tuple(map(int, ids)) if isinstance(ids, (list, tuple)) else (int(ids),)
