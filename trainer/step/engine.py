"""step: the policy inside a DeepSpeed ZeRO engine."""

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from math import isfinite
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast
from weakref import ReferenceType, ref

import deepspeed
import torch
from deepspeed.runtime import compiler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from trainer.config import ds_config
from trainer.config.settings import Config
from trainer.errors import CheckpointError, TrainingError, counted
from trainer.loss.logprobs import LogProbs
from trainer.model import lora, quantised
from trainer.model.embedding_and_head import causal_lm_of
from trainer.model.trained_weights import Snapshot, Trained
from trainer.ranks import distributed
from trainer.records import Scores, TrainingBatch, Update
from trainer.step import gradient_regularisation, muon, repartition
from trainer.step.optimizer import make_optimizer, schedule

FP16_LOSS_SCALE = 2.0**12  # prevents underflow in fp16 gradients that are computed outside the engine
MEASURED_STEPS = 10  # number of updates whose size is measured
# Python 3.11.0 to 3.11.3 would pickle a member as a call of getattr, which is refused when a checkpoint is read.
ZeroStageEnum.__reduce_ex__ = lambda self, _: (type(self), (self.value,))
PATIENCE = {"fp16": 24}  # fp16 starts with a loss scale of 2 ** 16 and halves it until gradients are finite


class DeepSpeedPolicy:
    """Implements `Policy`, which documents the methods, with the DeepSpeed engine. Each update is one reduction over
    the ranks and one optimizer step."""

    def __init__(self, model: Any, config: Config, dtype: str, total_steps: int) -> None:
        self.model = model
        self.total_steps = total_steps
        self.bad_updates_allowed = PATIENCE.get(dtype, 3)
        self.config = config
        self.dtype = dtype
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        causal_lm = causal_lm_of(model)
        # trained only with the whole model, and excluded from gradient regularisation
        ends = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
        self._ends = [parameter for end in ends for parameter in end.parameters(recurse=False)]
        self.is_displaced = False
        self._collected: gradient_regularisation.Gradient | None = None
        self._is_base = False
        trained = sum(parameter.numel() for parameter in self.trainable)
        template = ds_config.read(config.engine.ds_config)
        self.is_orthogonal = config.optim.name == "muon"
        settings = ds_config.fill(template, dtype, config.optim.max_grad_norm, trained=trained)
        if self.is_orthogonal:  # its updates have one size, which fp16 could not hold times the usual scale of 2 ** 16
            settings |= {"gradient_clipping": 0.0, "fp16": settings["fp16"] | {"initial_scale_power": 8}}
        if not distributed.on_gpu():
            deepspeed.ops.__compatible_ops__ = {}  # otherwise DeepSpeed compiles an all-reduce, which takes a minute
        _import_muon()
        self.splits_weights = ds_config.splits_weights(settings["zero_optimization"])
        self.is_gathered = False
        algorithm, flat = config.algorithm, config.optim.layout == "flat"
        has_bonus, offload = bool(algorithm.entropy_bonus), config.model.activation_offload
        scoring = LogProbs(model, config.rollout.temperature, has_bonus, flat, offload)
        self.is_flat = scoring.is_flat  # each token goes through the layers once, see `loss/shared_prefix.py`
        parts = {"model": scoring, "optimizer": make_optimizer(model, config)}
        self.peaks = [group["lr"] for group in parts["optimizer"].param_groups]
        self.engine, *_ = deepspeed.initialize(**parts, config=settings, dist_init_required=False)
        distributed.before_disconnect(partial(_leave, ref(self)))
        self.engine.checkpoint_engine.load = _load_without_code  # DeepSpeed's own function executes pickles
        self.engine.optimizer.update_offload_overflow_tracker_for_param_grad = lambda _: None  # see `_read_norms`
        self.engine.module.register_state_dict_post_hook(_keep_trained)
        self.engine.optimizer.loss_scaler.raise_error_at_min_scale = False  # `bad_updates_allowed` ends the run
        with self._whole(self.trainable):  # after the engine has rounded the weights
            self.trained = Trained(model, config, dtype)
            # the base of an adapter is in memory; the original weights of a whole model would be read in every step
            keeps = algorithm.kl.refresh is not None or (algorithm.kl.coef > 0 and not config.lora.enabled)
            self.reference = Snapshot(self.trainable) if keeps else None

    @contextmanager
    def gathered(self) -> Iterator[None]:
        if not self.splits_weights or self.is_gathered:
            yield
            return
        with unwrap_model_for_generation(self.engine):
            self.is_gathered = True
            try:
                yield
            finally:
                self.is_gathered = False

    def _whole(self, parameters: Iterable[Tensor], writes: bool = False) -> AbstractContextManager[Any]:
        """Gather some of the weights on every rank, for reading, or for writing the same values on all ranks."""
        is_needed = self.splits_weights and not self.is_gathered
        return GatheredParameters(parameters, modifier_rank=0 if writes else None, enabled=is_needed)

    def score(self, batch: TrainingBatch) -> Scores:
        # the engine's forward would attach its hooks to the result, or gather weights that are already gathered
        bypasses_engine = self._collected is not None or self.is_gathered
        # nor call the hook of ZeRO-3 on the whole module, in which ranks with other numbers of rows would wait
        return cast("Scores", self.engine.module.forward(batch) if bypasses_engine else self.engine(batch))

    @torch.no_grad()
    def measure(self, batch: TrainingBatch) -> Scores:
        """Return scores without a gradient, in the precision of the pass that they are compared with."""
        with self._precision():
            return self.score(batch)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a share of the step's loss. The engine averages over ranks, but the loss is a sum."""
        if self._collected is None:
            self.engine.backward(loss * distributed.world_size(), scale_wrt_gas=False)
            return
        scale = FP16_LOSS_SCALE if self.dtype == "fp16" else 1.0
        parts = torch.autograd.grad(loss * scale, self.trainable, allow_unused=True)
        for index, part in enumerate(parts):
            if part is not None:
                self._collected[index] += part.float() / scale

    def update(self, gradient: Callable[[], None], step: int) -> Update:
        """The gradient is reduced once over the ranks. The size of the first updates of an adapter is measured."""
        share = schedule(self.config.optim, step, self.total_steps)
        for group, peak in zip(self.engine.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * share
        self.engine.train()
        measured, norm = dict[str, float](), None
        if self._is_outside:
            with self.gathered():
                measured, norm = self._add_outside(gradient, step)
        else:
            with self.engine.coalesce_grad_reduction():
                gradient()
        is_measured = self.config.lora.enabled and not self.splits_weights and self.engine.global_steps < MEASURED_STEPS
        before_N = parameters_to_vector(self.trainable).detach() if is_measured else None
        self._read_norms()
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm()) if norm is None else norm
        if before_N is not None:
            change = (parameters_to_vector(self.trainable).detach() - before_N).norm() / before_N.norm()
            measured["update_size"] = float(change)
        return Update(norm, self.engine.get_lr()[0], self.engine.optimizer.overflow, measured)

    def _read_norms(self) -> None:
        """Read the norms of all gradients at once, and derive from them whether all are finite. DeepSpeed would wait
        for the card once for each gradient."""
        if norms := getattr(self.engine.optimizer, "norm_for_param_grads", None):
            norms.update(zip(norms, torch.stack(tuple(norms.values())).cpu()))
            self.engine.optimizer.local_overflow = not all(map(torch.isfinite, norms.values()))

    def rehearse(self, gradient: Callable[[], None]) -> None:
        if self._is_outside:
            with self.gathered(), self._precision():
                self._whole_gradient(gradient, displaced=False)
            return
        with self.engine.coalesce_grad_reduction():
            gradient()
            self._forget()

    def start_over(self) -> None:
        if self.splits_weights and not self.is_gathered:  # the other ranks wait while they gather a layer
            budget = self.config.optim.tokens_per_micro_batch
            reason = "out of memory in a training pass, which cannot be repeated with split weights (ZeRO-3)"
            remedy = f"Write optim.tokens_per_micro_batch={max(1, budget // 2)}"
            raise TrainingError(f"optim.tokens_per_micro_batch={budget}", reason, remedy)
        self._forget()

    def _forget(self) -> None:
        for part in self._collected or ():
            part.zero_()
        self.engine.optimizer.exit_backward()
        for parameter in self.trainable:  # on a CPU, ZeRO-3 fails if gradients exist
            parameter.grad = None
        self.engine.optimizer.zero_grad()

    @property
    def _is_outside(self) -> bool:
        """True if gradients are computed outside the engine, which sees only what becomes of them."""
        return self.is_orthogonal or bool(self.config.algorithm.gradreg.strength)

    def _precision(self) -> AbstractContextManager[None]:
        return gradient_regularisation.in_fp32(self.trainable if self.config.algorithm.gradreg.strength else [])

    def _add_outside(self, gradient: Callable[[], None], step: int) -> tuple[dict[str, float], float | None]:
        """Compute a regularised gradient or an orthogonal update outside the engine, and pass it on as the gradient of
        a linear function. Return measurements, and the norm of the gradient if the engine does not see it."""
        settings, measured, norm = self.config.algorithm.gradreg, dict[str, float](), None
        whole = partial(self._whole_gradient, gradient)
        with self._precision():
            if strength := gradient_regularisation.strength_at(settings, step):
                regularised = gradient_regularisation.regularised
                parts, first, second = regularised(whole, self.trainable, settings.eps, strength, self._ends)
                measured = {"gradreg/first_norm": first, "gradreg/second_norm": second, "gradreg/strength": strength}
            else:
                parts = whole(False)
        if self.is_orthogonal:
            norm = gradient_regularisation.norm_of(parts)
            if isfinite(norm):  # else the engine skips the update
                muon.make_orthogonal(parts)
        with self.engine.coalesce_grad_reduction():
            pairs = zip(self.trainable, parts, strict=True)
            linear = sum((parameter.float() * part).sum() for parameter, part in pairs)
            self.engine.backward(linear, scale_wrt_gas=False)
        return measured, norm

    def _whole_gradient(self, gradient: Callable[[], None], displaced: bool) -> gradient_regularisation.Gradient:
        """Return the gradient that `gradient` accumulates, summed over all ranks, without the engine's hooks."""
        self._collected = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self.trainable]
        self.is_displaced = displaced
        try:
            gradient()
            for part in self._collected:
                distributed.sum_in_place(part)
            return self._collected
        finally:
            self._collected, self.is_displaced = None, False

    def fingerprint(self) -> float:
        with self._whole(self.trainable):
            return lora.fingerprint(self.model)

    @property
    def version(self) -> int | None:
        """The number of updates of the weights in use, or None while they are those of the base model. If the run
        continues an existing adapter, its original values are version 0."""
        if self._is_base:
            return None if self.config.lora.start is None else 0
        return int(self.engine.global_steps)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        self._is_base = True
        try:
            with self.gathered(), self.trained.as_base(self.engine.global_steps):
                yield
        finally:
            self._is_base = False

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        with self.gathered(), self.reference.swapped_in() if self.reference else self.as_base():
            yield

    @contextmanager
    def as_teacher(self) -> Iterator[None]:
        with self.gathered(), lora.as_teacher(self.model):
            yield

    def refresh_reference(self, step: int) -> None:
        every = self.config.algorithm.kl.refresh
        if self.reference and every and step % every == 0:
            with self._whole(self.trainable):
                self.reference.take(self.trainable)

    def write_model(self, folder: Path) -> None:
        self.trained.write_model(folder)

    def release(self) -> None:
        # the engine's hooks keep the model alive, so deleting all our references to it is not enough
        self.engine.destroy()
        quantised.release(self.model)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.new_empty(0)
        torch.cuda.empty_cache()

    def save(self, folder: Path) -> None:
        """Save the optimizer state and the trained parameters, but not a frozen base. Every rank calls it."""
        reference = self.reference.values if self.reference and self.config.algorithm.kl.refresh else None
        state = {"start": self.trained.start(), "reference": reference}
        self.engine.save_checkpoint(str(folder), "engine", state, save_latest=False, exclude_frozen_parameters=True)
        if self.config.lora.enabled:
            with self._whole(self.trainable):
                if distributed.is_main():
                    self.write_model(folder / self.config.lora.product)

    def load(self, folder: Path) -> None:
        """Load a checkpoint that was saved by this or another number of ranks."""
        files = (folder / "engine").glob("*zero_pp_rank_*_optim_states.pt")
        parts = sorted(files, key=lambda path: int(path.name.partition("zero_pp_rank_")[2].partition("_")[0]))
        # DeepSpeed finds only files of this number of ranks, and names those of bf16 differently
        ranks, written_in_bf16 = distributed.world_size(), parts[0].name.startswith("bf16_")
        is_alike = len(parts) == ranks and written_in_bf16 == (self.dtype == "bf16")
        if not is_alike and self.splits_weights:
            written = f"{counted(len(parts), 'rank')} in {'bf16' if written_in_bf16 else 'fp16 or fp32'}"
            reason = f"split weights (ZeRO-3) of {written} cannot be redistributed to {ranks} in {self.dtype}"
            raise CheckpointError(folder, reason, "Start as the run began")
        scaler = self.engine.optimizer.loss_scaler
        options = {"load_module_strict": False, "load_optimizer_states": is_alike}
        _, state = self.engine.load_checkpoint(str(folder), tag="engine", **options)
        if not is_alike:
            repartition.load(self.engine.optimizer, parts, _load_without_code)
        if self.engine.optimizer.loss_scaler.dynamic != scaler.dynamic:  # fp16 has another one than fp32 and bf16
            self.engine.optimizer.loss_scaler = scaler
        if state["start"]:
            with self._whole(self.model.parameters(), writes=True):
                self.trained.restart(state["start"])
        if self.reference and state["reference"]:
            self.reference.take(state["reference"])


def _import_muon() -> None:
    """Import a module that DeepSpeed needs with the first gradient, without torch.compile, which takes a second."""
    with suppress(ImportError, AttributeError):  # some versions of DeepSpeed do not have it
        compile_function, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
        try:
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        finally:
            compiler.compile = compile_function


def _leave(policy: ReferenceType[DeepSpeedPolicy]) -> None:
    """Free the process group for a later run in this process, and the memory of the model, which a failed run keeps."""
    if deepspeed.comm.is_initialized():  # unless a policy that was made later has left it
        try:
            if (left := policy()) and distributed.world_size() == 1:  # several ranks might wait for each other
                with suppress(RuntimeError):  # the card may fail after an error, which is reported already
                    left.release()
        finally:
            deepspeed.comm.destroy_process_group()


def _load_without_code(path: str, map_location: Any = None) -> Any:
    """Read a file of a checkpoint, in which only tensors, plain values and four classes of DeepSpeed are allowed."""
    try:
        with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)
    except UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = found[1] if found else "a broken pickle"
        reason = f"it holds more than tensors ({what}), and a run saves only tensors"
        raise CheckpointError(path, reason, "Continue from a checkpoint that this run has written") from None


def _keep_trained(module: Any, state: dict[str, Any], *_: Any) -> None:
    """Remove what is not trained. DeepSpeed would save a frozen tied output layer, and scales of quantised weights."""
    trained = {name for name, value in module.named_parameters(remove_duplicate=False) if value.requires_grad}
    for name in set(state) - trained:
        del state[name]
