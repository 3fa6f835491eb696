"""Writes table.tsv from a short form: room, module, then what it holds."""
import sys
from pathlib import Path
OUT = []
def mod(room, old, new=None, **names):
    """old/new below outrider; names: Old="New" (class, function, constant); Old__attr="new"."""
    if new and new != old:
        OUT.append((room, "module", f"outrider.{old}", f"outrider.{new}"))
    for name, to in names.items():
        if "__" in name.strip("_") and not name.startswith("_"):
            klass, _, attr = name.partition("__")
            OUT.append((room, "attr", f"outrider.{old}:{klass}.{attr}", to))
        else:
            OUT.append((room, "name", f"outrider.{old}:{name}", to))
def row(*parts):
    OUT.append(parts)

# ---- server ---------------------------------------------------------------------------------------
R = "server"
mod(R, "server.apart", "server.engine_process", Apart="EngineClient", started="launch_engine", decode="run_engine_process",
    _obey="_handle_commands", Asked="AddRequest", Dropped="AbortRequest", Said="RequestOutput", EngineLost="EngineDeadError",
    Apart___hear="_on_outputs")
mod(R, "server.loop", "server.engine_loop", Loop="EngineLoop", Decoder="EngineProtocol", Running="BatchRunner", Ticket="PendingRequest",
    Event="OutputEvent", Full="QueueFullError", Stopped="EngineStoppedError", Load="QueueStats", spread="dispatch", Delivery="OutputCallback",
    Step="StepTiming")
mod(R, "server.desk", "server.request_handler", Desk="RequestHandler")
mod(R, "server.orders", "server.request_parsing", Orders="RequestParser", Choice="ChoiceState", Asked="TokenBudget")
mod(R, "server.answers", "server.response_builder", Writer="ResponseBuilder", Form="RouteFormat", Completions="CompletionFormat", Chats="ChatFormat",
    absorb="append_output", Prediction="PredictionCounts", Form__said="message", Completions__said="message", Chats__said="message",
    Form__more="delta", Completions__more="delta", Chats__more="delta", Writer__more="delta")
mod(R, "server.bodies", "server.protocol", CompletionBody="CompletionRequest", ChatBody="ChatCompletionRequest", Sent="ResumeState",
    FaultBody="ErrorResponse", Fault="ErrorDetail", Common="BaseRequest", Text="ContentPart", Prediction="PredictedContent", Body="OpenAIBaseModel")
mod(R, "server.known", "server.model_info", Writes="TextModelInfo", Hears="SpeechModelInfo", Known="ModelInfo")
mod(R, "server.words", "server.token_formatter", Words="TokenFormatter")
mod(R, "server.spoken", "server.transcription_runner", Spoken="TranscriptionRequest", Heard="TranscriptionOutput", Recordings="TranscriptionRunner")
mod(R, "server.transcripts", "server.serving_transcription", Ear="TranscriptionHandler")
mod(R, "server.counts", "server.metrics", Counts="ServerMetrics", Counts__watch="register", Counts__over="on_finish", Counts__heard="on_output", Counts__page="render")
mod(R, "server.faults", "server.errors", Refusal="APIError", told="to_response", invalid="from_validation_error")
mod(R, "server.guard", "server.middleware", Guard="AuthLimitMiddleware", Limits="RequestLimits", _Over="_RequestRejected")
mod(R, "server.lanes", "server.speculation_methods", Lanes="MethodRouter", Methods="MethodSet")
mod(R, "server.decoding", "server.engine_factory", Room="EngineConfig", opened="build_engine",
    Room__rows="max_num_seqs", Room__capacity="max_model_len", Room__most_waiting="max_queued_requests", Room__kept_bytes="prefix_cache_bytes")
mod(R, "server.app", None, Service="ServerConfig", Site="Server", make="build_app", around="build_app_for",
    Service__rows="max_num_seqs", Service__capacity="max_model_len", Service__most_waiting="max_queued_requests", Service__kept_bytes="prefix_cache_bytes",
    Service__room="engine_config")
mod(R, "server.serving", None, Going="ActiveStream")
mod(R, "server.batch_file", None, Answers="BatchResults", Wanted="BatchLine")
mod(R, "server.fleet", "server.ray")
mod(R, "server.fleet.going_on", "server.ray.stream_resume", GoingOn="StreamState")
mod(R, "server.fleet.inside", "server.ray.asgi_call")
mod(R, "server.fleet.replicas", None, Settings="ReplicaConfig",
    Settings__rows="max_num_seqs", Settings__capacity="max_model_len", Settings__most_waiting="max_queued_requests")

# ---- models ---------------------------------------------------------------------------------------
R = "models"
mod(R, "models.retold", "models.token_remap", Retold="RetokenizedText", Translation="VocabularyMap", between="vocabulary_map", common="common_prefix_length")
mod(R, "models.translated", "models.cross_tokenizer_model", _Row="_TranslatedRow")
mod(R, "models.spelling", "models.token_bytes", Spelling="TokenBytes")
mod(R, "models.vocabularies", None, Words="VocabularyPair")
mod(R, "models.settle", "models.runtime_config", Wish="RuntimeOptions", settle="resolve_runtime", told="describe_draft_dtype")
mod(R, "models.between", "models.layer_ops", Between="LayerOps", Call="LayerOpsCall", Operators="TorchLayerOps", Shape="AttentionShape", _Call="_TorchCall")
mod(R, "models.layer", None, Shape="LayerShape")
mod(R, "models.over", "models.model_wrapper", Over="ModelWrapper")
mod(R, "models.beside", "models.draft_source", source_of="resolve_draft")
mod(R, "models.laid", "models.weight_packing", in_8_bits="quantize_int8", packed="pack_linear_layers")
mod(R, "models.linear", None, Steady="BatchInvariantLinear", reads_in_place="supports_unpacked")
mod(R, "models.rounding", "models.batch_invariance", Rounding="BatchInvariance", Rows="PaddingPolicy", concerns="applies_to")
mod(R, "models.attention", None, Steady="BatchInvariantAttention")
mod(R, "models.causal", "models.decoder", CausalModel="TreeDecoder", Runner="ModelRunner", Reader="EncoderAdapter")
mod(R, "models.part", "models.early_exit")
mod(R, "models.parts", "models.module_tree", Parts="ModuleTree")
mod(R, "models.shallow", "models.layer_subset")
mod(R, "models.shallow_source", "models.layer_subset_source", Layers="LayerSubset", ShallowSource="LayerSubsetSource")
mod(R, "models.prefixes", "models.prefix_cache", Prefixes="PrefixCache", Rows="PrefixHits")
mod(R, "models.refusals", "models.unsupported")
mod(R, "models.check", "models.load_checks")
mod(R, "models.sizes", "models.flops")
mod(R, "models.nodes", "models.tree_inputs")
mod(R, "models.guard", "models.model_lock", _Guard="_Locked")
mod(R, "models.sources", None, Source="ModelSource")
mod(R, "models.heads.following", "models.heads.autoregressive_head", Following="AutoregressiveHead")
mod(R, "models.heads.dflash", None, Masked="MaskedBlockHead")
mod(R, "models.heads.blockwise", None, AtOnce="ParallelHead")
mod(R, "models.heads.lent", "models.heads.target_bound_source", Lent="TargetBoundSource")
mod(R, "models.heads.lean", "models.heads.eagle3_cpu", Lean="Eagle3Cpu")
mod(R, "models.heads.eagle3", None, Kind="Eagle3Variant")
mod(R, "models.heads.head", None, Head="DraftHead")
mod(R, "models.seq2seq.crossed", "models.seq2seq.cross_attention_cache", Crossed="CrossAttentionCache")
mod(R, "models.seq2seq.kinds", "models.seq2seq.input_modality", Kind="InputModality", kind_of="modality_of", Text="TextInput", Window="WindowInput",
    Recording="RecordingInput", Pixels="PixelInput")
mod(R, "models.sharded", "models.distributed")
mod(R, "models.sharded.orders", "models.distributed.rpc", Open="OpenCache", Take="TakeRows", Put="PutRows", Narrow="NarrowRows", Drop="DropCache",
    Keep="KeepPath", Call="ForwardCall", End="StopWorker", _Letter="_Envelope", Wire="Broadcaster")
mod(R, "models.native", "models.cpu_kernels", Compiled="CpuKernels", unfit="unsupported_reason", _Sizes="_AttentionSizes", _Call="_KernelCall")
mod(R, "models.native.cross", "models.cpu_kernels.cross_attention", unfit="unsupported_reason")
mod(R, "models.native.tiles", "models.cpu_kernels.tile_kernels", unfit="unsupported_reason")
mod(R, "models.native.int8", None, unfit="unsupported_reason")
mod(R, "models.whisper", None, _Layer="_DecoderLayer", _Call="_WhisperCall")
mod(R, "models.whisper_encoder", None, _Layer="_EncoderLayer")
mod(R, "models.calibrate", None, Config="ModelConfig")

# ---- engine ---------------------------------------------------------------------------------------
R = "engine"
mod(R, "engine.run", "engine.engine_run", Run="EngineRun", Run__forget="release", Run__watched="prompt_logits")
mod(R, "server.loop", None, Running__forget="release")
mod(R, "server.spoken", None, Recordings__forget="release")
mod(R, "server.prompt_scores", None, PromptScores__forget="release")
mod(R, "engine.seating", "engine.scheduler", Seating="Scheduler")
mod(R, "engine.seats", "engine.slots", Seats="SlotTable")
mod(R, "engine.ledger", "engine.request_state", Ledger="RequestTable", Entry="RequestState", Phase="RequestStatus")
mod(R, "engine.blocks", "engine.outputs", HostBlock="StepOutput", Pending="InFlightOutput")
mod(R, "engine.logprobs", None, Told="StepLogprobs", told="gather_logprobs", Law="ReportedProbs")
mod(R, "engine.request", None, Limits="StopConditions", spread="broadcast_setting", capped="clip_shape")
mod(R, "engine.graphs", None, verbs="spec_decode_step", Made="GraphedStep")
mod(R, "engine.batch", None)
mod(R, "engine.search", "engine.beam_search", )
mod(R, "engine.search.proposers", "engine.beam_search.candidate_sources", Offered="OfferedCandidates", Drafted="DraftedCandidates", Nothing="NoCandidates", Proposer="CandidateSource")
mod(R, "engine.search.oracle", "engine.beam_search.scorer", Oracle="PrefixScorer", _Row="_ScoredRow")
mod(R, "engine.search.pace", "engine.beam_search.lookahead", Pace="LookaheadDepth", Paces="LookaheadDepths")
mod(R, "engine.search.patient", "engine.beam_search.patience")
mod(R, "engine.search.shaped", "engine.beam_search.logits_processing")
mod(R, "engine.search.run", None, Search="BeamSearch", Counts="SearchCounts")
mod(R, "engine.search.step", None, Finished="FinishedBeam")
mod(R, "engine.planner", "engine.speculation_policy")
mod(R, "engine.planner.memory", None, Leaning="AcceptanceEstimate", Wait="Backoff", Streaks="MatchStreaks")
mod(R, "engine.planner.prices", "engine.speculation_policy.cost_model", Pricing="CostModel", Prices="StepPrices")
mod(R, "engine.planner.protocol", None, Row="PlannedRow", View="BatchView", Finished="StepReport", Report="PlanReport")
mod(R, "engine.planner.pool", None, Pool="SharedEstimates")
mod(R, "engine.planner.adaptive", None, Session="AdaptiveState")
mod(R, "engine.planner.fixed", "engine.speculation_policy.fixed_length", Fixed="FixedLength")
mod(R, "types.drafts", None, Block="StepTensors", BlockLists="StepLists", Kind="DrawKind", Tree="TokenTree")
OUT.pop()  # TokenTree: `Tree` stays, lab.papers.published gives way
mod(R, "types.drafters", None, Known="RowHints", Shape="DraftShape")

# ---- sampling -------------------------------------------------------------------------------------
R = "sampling"
mod(R, "laws", "sampling")
mod(R, "laws.sampling", "sampling.sampling_params", Sampling="SamplingParams")
mod(R, "laws.shaping", "sampling.logits_processors", admit="validate", shape="apply")
mod(R, "laws.processors", "sampling.custom_processors")
mod(R, "laws.places", "sampling.begin_end_suppression")
mod(R, "laws.replay", "sampling.processor_replay", _Allowed="_AllowedByReplay")
mod(R, "laws.prefixes", None, Prefixes="NodePrefixes")
mod(R, "rows", "row_params", Columns="RowTable", placed="scatter_rows", taken="gather_rows")
mod(R, "odds", "acceptance_stats", Odds="AcceptanceStats")

# ---- drafters, verifiers, ops ---------------------------------------------------------------------
R = "drafters"
mod(R, "drafters.either", None, Sides="SourceStats", Memory="EitherState")
mod(R, "drafters.recall", None, Row="RecallRow")
mod(R, "drafters.recycled", "drafters.token_recycling")
mod(R, "drafters.earlier", "drafters.request_history", Earlier="RequestHistory")
mod(R, "drafters.placed", "drafters.deterministic_tree", Grown="HostTree")
mod(R, "drafters.growing", "drafters.tree_drafting")
mod(R, "drafters.growing.pool", "drafters.tree_drafting.dynamic_tree_builder", Pool="CandidatePool")
mod(R, "drafters.growing.loop", None, Keys="DrawKeys", Model="TreeModel", Source="ProposalSource")
mod(R, "drafters.growing.shapes", None, Level="TreeLevel")
mod(R, "drafters.tempered", "drafters.draft_sampling")
mod(R, "drafters.hub_tree", None, Hub="HubPolicy")
mod(R, "drafters.cascade", None, Copies="CopyGuesser")
mod(R, "drafters.lookahead", None, Guesses="NgramPool", _Plan="_LookaheadPlan")
mod(R, "drafters.memory", None, Rows="RowMemories", Nothing="NoMemory")
mod(R, "drafters.suffix", None, Row="SuffixRow")
mod(R, "drafters.recipes", None, Parts="DrafterParts")
R = "verifiers"
mod(R, "verifiers.narrowed", "verifiers.aliases", Narrowed="AliasedVerifier")
mod(R, "verifiers.siblings", "verifiers.sibling_draws", Siblings="SiblingDraws", Level="SiblingLevel")
mod(R, "verifiers.topdown", "verifiers.tree_walk", Judgement="NodeDecision")
mod(R, "verifiers.kernels", "verifiers.kernel_dispatch", Call="KernelCall", judge="run_kernel")
mod(R, "verifiers.block", None, Block="BlockVerifier")
mod(R, "verifiers.hub", None, Hub="HubVerifier")
mod(R, "verifiers.otm", None, Plan="TransportPlan", judge="verify")
mod(R, "verifiers.kseq", None, judge="verify")
mod(R, "verifiers.rejection", None, judge="verify")
R = "ops"
for name in ("block", "chain", "kseq", "match", "traversal", "tree"):
    mod(R, f"ops.cpu.{name}", None, judge="verify")
for name in ("block", "chain", "match", "traversal", "tree"):
    mod(R, f"ops.triton.{name}", None, judge="verify")
mod(R, "ops.cpu.urns", "ops.cpu.batched_without_replacement", Urns="DrawsWithoutReplacement")
mod(R, "ops.cpu.walk", "ops.cpu.rejection_walk", Walk="RejectionWalk")
mod(R, "ops.cpu.settling", "ops.cpu.commit_tokens", _Row="_CommittedRow")
mod(R, "ops.cpu.lists", "ops.cpu.host_tables", Tables="HostTables")
mod(R, "ops.cpu.rows", "ops.cpu.law_slices", Rows="WeightRows", Weights="RowWeights", Urn="DrawWithoutReplacement")
mod(R, "ops.triton.left", "ops.triton.residual")
mod(R, "ops.triton.following", "ops.triton.residual_race")
mod(R, "ops.triton.side", "ops.triton.law_slices")
mod(R, "ops.triton.tables", None, Keys="NoiseKeys", Tables="DeviceTables")
mod(R, "ops.triton.floors", None, Limits="FloorLimits", Search="FloorSearch")
mod(R, "ops.triton.traversal", None, Nodes="NodePointers")
mod(R, "ops.cpu.compiled", None, _Sizes="_KernelSizes")

# ---- text and speech ------------------------------------------------------------------------------
R = "text"
mod(R, "text.asked", "text.prompts", Asked="EncodedPrompts", Reader="PromptEncoder")
mod(R, "text.answer", "text.output_text", Answer="IncrementalText")
mod(R, "text.opening", "text.decoder_prompt", Opening="DecoderPrompt")
mod(R, "text.speculator", None, Options="GenerateOptions")
R = "speech"
mod(R, "text.speech", "speech")
mod(R, "text.speech.hearing", "speech.speech_model", Hearing="WhisperModel", deaf="not_a_speech_model")
mod(R, "text.speech.transcriber", None, _Track="_RecordingState")
mod(R, "text.speech.decoding", "speech.window_decoder", Job="WindowRequest", Rows="WindowDecoder", Text="WindowText")
mod(R, "text.speech.windows", None, Heard="DecodedWindow", Following="SequentialWindows", AtPauses="VadWindows", Windows="WindowSource", Window="AudioWindow")
mod(R, "text.speech.script", "speech.reference_aligner", Script="ReferenceAligner")
mod(R, "text.speech.pieces", "speech.timestamps_split", Piece="TimedPiece")
mod(R, "text.speech.silences", "speech.vad")
mod(R, "text.speech.fallback", "speech.temperature_fallback", again="needs_fallback")
mod(R, "text.speech.searched", "speech.beam_decoding", _Allowed="_AllowedTokens")
mod(R, "text.speech.settings", None, Options="TranscribeOptions", Settings="TranscribeSettings")
mod(R, "text.speech.captions", None, Line="CaptionLine")
mod(R, "text.speech.features", "speech.feature_extractor")

# ---- the rest: certify, integrations, cli, train, lab ---------------------------------------------
R = "certify"
mod(R, "certify.surplus", "certify.martingale")
mod(R, "certify.verdicts", "certify.verification_tests")
mod(R, "certify.margins", "certify.near_tie_certificate")
mod(R, "certify.judge", "certify.runner", Judge="CertifyRunner", Prompt="CertifiedPrompt")
mod(R, "certify.laws", None, Text="CertifiedText", Guesses="DraftGuesses")
mod(R, "certify.conditional", None, Pool="PooledTest")
mod(R, "certify.run", None, Known="CertifiedModel")
mod(R, "certify.matrix", None, Pair="ModelPair")
mod(R, "certify.report", None, Report="CertifyReport")
R = "integrations"
mod(R, "integrations.arranged", "integrations.generate_setup", Arranged="GenerateSetup", arranged="generate_setup")
mod(R, "integrations.driven", "integrations.wrapped_models")
mod(R, "integrations.decoded", "integrations.run_generate", Asked="GenerateInputs")
mod(R, "integrations.call", "integrations.generate_call", Call="GenerateCall", Rows="CallRows", Made="GenerateResult")
mod(R, "integrations.sources", "integrations.encoder_inputs", Given="EncoderSources")
mod(R, "integrations.silence", "integrations.no_speech")
mod(R, "integrations.kept_scores", "integrations.output_scores", KeptScores="OutputScores")
mod(R, "integrations.native", "integrations.logits_processor_mapping")
mod(R, "integrations.beamed", "integrations.beam_generate", Search="BeamGenerate")
mod(R, "integrations.criteria", None, Judge="CriteriaJudge")
mod(R, "integrations.arms", None, Completion="TimedCompletion")
mod(R, "integrations.transformers", None, Calls="PatchedCalls")
mod(R, "integrations.windows", None, Windows="GenerateWindows")
mod(R, "integrations.generate", None, Speculative="SpeculativeGenerate")
mod(R, "integrations.vllm.judging", "integrations.vllm.verification", Sampling="VllmSampling", Drafted="VllmDraft")
mod(R, "integrations.vllm.proposer", None, Speculative="VllmSpeculativeConfig", Model="VllmModel", Config="VllmConfig", _Row="_ProposerRow", Proposer="VllmProposer")
OUT.pop()  # Proposer: the name that users give to vLLM
R = "lab"
mod(R, "train.loss", None, Batch="TrainBatch")
mod(R, "train.loop", None, Plan="TrainPlan")
mod(R, "train.card", None, Report="TrainReport")
mod(R, "train.students", None, Head="HeadStudent", Layers="LayerStudent")
mod(R, "train.texts", None, Piece="TextPiece")
mod(R, "train.features", None, Text="TrainText")
mod(R, "train.job", None, Task="TrainTask")
mod(R, "theory.capacity", None, Parts="CostParts")
for name, word in (("alpha", "Alpha"), ("chen", "Chen"), ("layers", "Layers"), ("theory", "Theory")):
    mod(R, f"lab.papers.{name}", None, Amount=f"{word}Amount")
mod(R, "lab.tasks.run", None, Amount="TasksAmount", Answers="TaskAnswers")
for name, word in (("beams", "Beam"), ("trees", "Tree"), ("wagner", "Wagner")):
    mod(R, f"lab.papers.{name}", None, Arm=f"{word}Arm")
mod(R, "lab.papers.chen", None, Asked="ChenRequest", Task="ChenTask")
mod(R, "lab.papers.options", None, Asked="PaperRequest")
mod(R, "lab.tasks.experiment", None, Asked="ExperimentRequest")
mod(R, "lab.tasks.prompts", None, Task="PromptTask")
mod(R, "lab.papers.wagner", None, Calls="WagnerCalls", Text="WagnerText")
mod(R, "lab.bandwidth", None, Ceiling="BandwidthCeiling")
mod(R, "lab.measure", None, Ceiling="SpeedCeiling")
mod(R, "lab.papers.alpha_drafters", None, Copies="AlphaCopies", Source="AlphaSource")
mod(R, "lab.timeline", None, Line="TimelineLine")
mod(R, "lab.papers.wagner_pairs", None, Pair="WagnerPair", Prompt="WagnerPrompt")
mod(R, "lab.book.findings", None, Part="FindingsPart")
mod(R, "lab.book.report", None, Part="ReportPart")
mod(R, "lab.compare", None, Plan="ComparePlan", Table="CompareTable")
mod(R, "lab.papers.tree_runs", None, Plan="TreePlan")
mod(R, "lab.book.plan", None, Run="BookRun")
mod(R, "lab.recordings", None, Spoken="SpokenText")
mod(R, "lab.papers.published", None, Tree="PublishedTree")
mod(R, "lab.papers.layers", None, Weights="LayerWeights")
mod(R, "cli.generate", None, _Asked="_GenerateRequest")
mod(R, "cli.serve", None, _Asked="_Terminated")
R = "cli"
mod(R, "cli.hearing", "cli.options_transcribe")
mod(R, "cli.planned", "cli.describe_plan")
mod(R, "cli.paint", "cli.colorize")
mod(R, "cli.reading", "cli.inputs")
mod(R, "cli.certified", "cli.certify_inputs")

# ---- load's arguments and the command line --------------------------------------------------------
R = "arguments"
for where in ("load", "loading"):
    for old, new in (("packed", "pack_weights"), ("costs", "step_costs"), ("coupled", "shared_noise"), ("acceptance", "tree_acceptance")):
        row(R, "param", f"outrider.{where}:load.{old}", new)
for name in ("draft_model", "dynamic_tree", "either", "layer_skip", "translated", "cascade", "beam", "paths", "static_tree"):
    row(R, "param", f"outrider.drafters.{name}:_made.coupled", "shared_noise")
row(R, "attr", "outrider.models.runtime_config:RuntimeOptions.packed", "pack_weights")
row(R, "attr", "outrider.drafters.recipes:DraftOptions.coupled", "shared_noise")
row(R, "attr", "outrider.drafters.recipes:DraftOptions.acceptance", "tree_acceptance")
for old, new in (("coupled", "shared_noise"), ("acceptance", "tree_acceptance"), ("costs", "step_costs")):
    row(R, "attr", f"outrider.cli.options:Setup.{old}", new)
R = "cli"
for old, new in (("rows", "max_num_seqs"), ("capacity", "max_model_len"), ("most_waiting", "max_queued_requests"), ("kept_prompts", "prefix_cache_mib")):
    row(R, "param", f"outrider.cli.serve:serve.{old}", new)
for old, new in (("rows", "max_num_seqs"), ("capacity", "max_model_len")):
    row(R, "param", f"outrider.cli.batch:batch.{old}", new)
R = "tests"
for old, new in {
    "tests/exactness": "tests/exactness", "tests/logits_processing": "tests/logits_processing", "tests/beam_search": "tests/beam_search",
    "tests/server/test_engine_process.py": "tests/server/test_engine_process.py", "tests/server/test_speculation_methods.py": "tests/server/test_speculation_methods.py",
    "tests/models/test_token_remap.py": "tests/models/test_token_remap.py", "tests/models/test_batch_invariance.py": "tests/models/test_batch_invariance.py",
    "tests/models/test_module_tree.py": "tests/models/test_module_tree.py", "tests/models/test_layer_subset.py": "tests/models/test_layer_subset.py",
    "tests/models/test_distributed.py": "tests/models/test_distributed.py", "tests/models/test_cpu_kernels.py": "tests/models/test_cpu_kernels.py",
    "tests/models/test_cpu_kernel_build.py": "tests/models/test_cpu_kernel_build.py", "tests/models/test_tile_kernels.py": "tests/models/test_tile_kernels.py",
    "tests/models/test_eagle3_cpu.py": "tests/models/test_eagle3_cpu.py", "tests/engine/test_outputs.py": "tests/engine/test_outputs.py",
    "tests/beam_search/test_lookahead_depth.py": "tests/beam_search/test_lookahead_depth.py", "tests/beam_search/test_prefix_scorer.py": "tests/beam_search/test_prefix_scorer.py",
    "tests/beam_search/test_candidate_sources.py": "tests/beam_search/test_candidate_sources.py", "tests/beam_search/test_beam_logits_processing.py": "tests/beam_search/test_beam_logits_processing.py",
    "tests/ops/test_residual.py": "tests/ops/test_residual.py", "tests/speech/test_timestamps_split.py": "tests/speech/test_timestamps_split.py",
    "tests/speech/test_beam_windows.py": "tests/speech/test_beam_windows.py",
}.items():
    row(R, "path", old, new)
text = Path(__file__).with_name("texts.tsv")
lines = ["\t".join(part or "" for part in one) for one in OUT]
Path(__file__).with_name("table.tsv").write_text("\n".join(lines) + "\n" + (text.read_text() if text.exists() else ""))
print(len(lines), "rows")
