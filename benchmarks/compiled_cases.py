"""The runs that `benchmarks.compiled` compiles, a line each, by set: a new case is a new line.

A line has the case's name, the model, the global batch size and more options of `megajax train`, or of `megajax plan` if it
is a question. Options after the name of a set are of all of its lines below, whose own override them.
"""

TABLE = """
[time]
175b                    gpt3-175b       64  --tensor 8 --pipe 8 --chunks 3
175b-vocab-tensor       gpt3-175b       64  --tensor 8 --pipe 8 --chunks 3 --vocab-parallel tensor
175b-1f1b               gpt3-175b       64  --tensor 8 --pipe 8 --schedule 1f1b
175b-zb_v               gpt3-175b       64  --tensor 8 --pipe 8 --schedule zb_v --chunks 2
175b-full               gpt3-175b       64  --tensor 8 --pipe 8 --schedule eager_1f1b --recompute full
175b-zero1              gpt3-175b      128  --tensor 8 --pipe 4 --data 4 --zero 1 --chunks 2
175b-t4                 gpt3-175b       64  --tensor 4 --pipe 32 --chunks 3 --vocab-parallel tensor
1t                      gpt3-1t        128  --tensor 8 --pipe 64 --chunks 2
1t-1f1b                 gpt3-1t        256  --tensor 8 --pipe 64 --schedule 1f1b
405b                    llama3.1-405b  512  --tensor 8 --pipe 16 --chunks 4 --data 8 --zero 1
llama2-7b               llama2-7b       64  --tensor 2 --pipe 2 --data 2 --schedule eager_1f1b
llama2-7b-1f1b          llama2-7b       32  --tensor 2 --pipe 4 --schedule 1f1b
llama2-7b-tensor        llama2-7b       16  --tensor 8
llama2-7b-zero1         llama2-7b       64  --layers 8 --data 8 --zero 1 --microbatch-size 2
llama2-7b-zero3         llama2-7b       64  --data 8 --zero 3
llama2-7b-context       llama2-7b        8  --context 4 --tensor 2 --zero 1 --sequence-length 16384
llama2-7b-context-pipe  llama2-7b       16  --context 2 --pipe 2 --tensor 2 --chunks 2 --sequence-length 8192
llama2-7b-offload       llama2-7b       32  --tensor 2 --pipe 2 --schedule 1f1b --recompute full --offload-activations
llama2-7b-one-block     llama2-7b       32  --pipe 8 --chunks 4 --attention xla --microbatch-size 2
llama3-8b-chunks        llama3-8b       32  --tensor 2 --pipe 2 --chunks 2
llama3-8b-vocab-tensor  llama3-8b       32  --tensor 2 --pipe 4 --chunks 2 --vocab-parallel tensor
llama3-8b-zero3         llama3-8b       32  --tensor 2 --data 4 --zero 3
llama3-8b-context       llama3-8b        4  --context 4 --tensor 2 --data 2 --zero 1 --sequence-length 32768
13b-1f1b                gpt3-13b       128  --tensor 2 --pipe 4 --data 2 --zero 1 --schedule 1f1b --microbatch-size 2
13b-zb_h1               gpt3-13b        32  --tensor 4 --pipe 4 --schedule zb_h1
13b-gpipe               gpt3-13b        32  --tensor 4 --pipe 4 --schedule gpipe --recompute full
13b-none                gpt3-13b        64  --tensor 4 --pipe 2 --chunks 2 --recompute none --microbatch-size 2
13b-xla                 gpt3-13b        32  --tensor 8 --pipe 2 --chunks 2 --attention xla
6.7b-pipe               gpt3-6.7b       64  --pipe 4 --chunks 2 --microbatch-size 2
6.7b-1f1b               gpt3-6.7b       64  --pipe 8 --schedule 1f1b --microbatch-size 2
6.7b-zb_h1              gpt3-6.7b       64  --pipe 4 --schedule zb_h1 --microbatch-size 2
6.7b-fp8                gpt3-6.7b       32  --tensor 2 --pipe 2 --matmul-dtype fp8
6.7b-ring               gpt3-6.7b       32  --tensor 4 --pipe 2 --chunks 2 --tensor-overlap ring
175b-ring               gpt3-175b       64  --tensor 8 --pipe 8 --chunks 3 --tensor-overlap ring
llama2-7b-ring          llama2-7b       64  --tensor 2 --pipe 2 --data 2 --tensor-overlap ring
mixtral                 mixtral-8x7b    32  --sequence-length 4096 --tensor 4 --pipe 4 --chunks 2
mixtral-expert          mixtral-8x7b    64  --sequence-length 4096 --pipe 4 --data 8 --expert 8 --chunks 2
mixtral-1f1b            mixtral-8x7b    64  --sequence-length 4096 --pipe 4 --data 8 --expert 8 --schedule 1f1b
mixtral-full            mixtral-8x7b    64  --sequence-length 4096 --tensor 2 --pipe 2 --data 4 --expert 4 --recompute full
mixtral-zb_h1           mixtral-8x7b    64  --sequence-length 4096 --tensor 2 --pipe 4 --data 4 --expert 4 --schedule zb_h1
mixtral-layers          mixtral-8x7b     8  --sequence-length 4096 --layers 2
qwen3-moe               qwen3-30b-a3b   64  --sequence-length 4096 --data 8 --expert 8 --zero 1
qwen3-moe-tensor        qwen3-30b-a3b   64  --sequence-length 4096 --tensor 2 --pipe 4 --data 4 --expert 4
bert                    bert-336m      256  --data 8 --microbatch-size 8
bert-tensor             bert-1.3b      256  --data 4 --tensor 2 --microbatch-size 8
one-gpu gpt2-xl 16 --layers 8 --hidden 4096 --heads 32 --sequence-length 2048 --dropout 0 --microbatch-size 4
[memory] --attention xla --vocab-parallel tensor
# the papers' large runs: 2104.04473 table 1, 2205.05198 table 5, and GPT-3 on 1,024 GPUs
175b            gpt3-175b         64 --pipe 8 --tensor 8 --chunks 3
175b-data       gpt3-175b       1536 --data 8 --pipe 16 --tensor 8 --chunks 3
145.6b-full     megatron-145.6b 2304 --data 24 --pipe 8 --tensor 8 --chunks 2 --microbatch-size 2 --recompute full
310.1b-full     megatron-310.1b 2160 --data 15 --pipe 16 --tensor 8 --chunks 2 --recompute full
529.6b-full     megatron-529.6b 2520 --data 9 --pipe 35 --tensor 8 --chunks 3 --recompute full
529.6b          megatron-529.6b  280 --pipe 35 --tensor 8 --chunks 3
1008b-full      megatron-1008b  3072 --data 6 --pipe 64 --tensor 8 --schedule 1f1b --recompute full
1008b           megatron-1008b   512 --pipe 64 --tensor 8 --schedule 1f1b
22b             gpt3-175b          8 --layers 48 --hidden 6144 --heads 64 --data 2 --tensor 8 --microbatch-size 4
76.1b-full      megatron-76.1b  1792 --data 32 --pipe 4 --tensor 8 --chunks 3 --microbatch-size 2 --recompute full
39.1b-full      megatron-39.1b  1536 --data 32 --pipe 2 --tensor 8 --microbatch-size 4 --schedule 1f1b --recompute full
18.4b-full      megatron-18.4b  1024 --data 32 --tensor 8 --microbatch-size 8 --recompute full
# smaller ones: every schedule, recompute mode, and kind of model
7.5b            megatron-7.5b    512 --data 32 --tensor 4 --microbatch-size 4
1.7b-full       megatron-1.7b    512 --data 32 --microbatch-size 4 --recompute full
llama2-7b       llama2-7b         64 --data 4 --pipe 4 --tensor 2 --chunks 2
6.7b-zb_h1      gpt3-6.7b         32 --data 2 --pipe 4 --tensor 4 --schedule zb_h1
13b-zb_v        gpt3-13b          32 --data 2 --pipe 4 --tensor 4 --chunks 2 --schedule zb_v
13b-zb_1p       gpt3-13b          16 --pipe 4 --tensor 4 --chunks 2 --schedule zb_1p_interleaved
13b-gpipe       gpt3-13b          16 --pipe 4 --tensor 8 --schedule gpipe --recompute full
6.7b-1f1b       gpt3-6.7b         16 --pipe 4 --tensor 2 --schedule 1f1b --recompute none
13b-no-sp       gpt3-13b          16 --pipe 2 --tensor 4 --schedule eager_1f1b --no-sequence-parallel
gpt2-xl         gpt2-xl           64 --data 2 --pipe 4 --chunks 2 --microbatch-size 2
2.7b-fp16       gpt3-2.7b         16 --pipe 2 --tensor 2 --chunks 2 --microbatch-size 2 --precision fp16
6.7b-none       gpt3-6.7b         16 --pipe 4 --tensor 2 --chunks 2 --recompute none
6.7b-1f1b-b2    gpt3-6.7b         16 --pipe 2 --tensor 4 --microbatch-size 2 --schedule 1f1b --recompute none
llama2-7b-eager llama2-7b         32 --data 2 --pipe 2 --tensor 4 --microbatch-size 2 --schedule eager_1f1b
13b-zb_h1       gpt3-13b          16 --pipe 4 --tensor 4 --schedule zb_h1 --recompute full
gpt2-large      gpt2-large        64 --data 2 --pipe 2 --tensor 2 --chunks 2 --microbatch-size 4 --recompute none
175b-zb_v       gpt3-175b         64 --pipe 16 --tensor 8 --chunks 2 --schedule zb_v
13b-1p-full gpt3-13b 16 --pipe 4 --tensor 8 --chunks 2 --microbatch-size 2 --schedule zb_1p_interleaved --recompute full
18.4b-chunks    megatron-18.4b   128 --data 4 --pipe 8 --tensor 2 --chunks 5
[memory] --vocab-parallel tensor
# cuDNN's attention, which keeps no scores
175b-cudnn      gpt3-175b         64 --pipe 8 --tensor 8 --chunks 3 --vocab-parallel pipe
6.7b-cudnn      gpt3-6.7b         16 --pipe 4 --tensor 2 --schedule 1f1b --recompute none
llama2-7b-cudnn llama2-7b         64 --data 4 --pipe 4 --tensor 2 --chunks 2
18.4b-cudnn     megatron-18.4b  1024 --data 32 --tensor 8 --microbatch-size 8 --recompute full
13b-cudnn       gpt3-13b          32 --data 2 --pipe 4 --tensor 4 --chunks 2 --schedule zb_v
7.5b-cudnn      megatron-7.5b    512 --data 32 --tensor 4 --microbatch-size 4 --recompute none
[memory]
# rotary positions and gated MLPs; chunks of one block; ZeRO-1, fp8 and what recompute none keeps
llama3-8b-zero1 llama3-8b         64 --data 8 --pipe 4 --tensor 2 --chunks 4 --recompute full --zero 1
llama2-7b-zero1 llama2-7b         64 --data 4 --pipe 2 --tensor 2 --chunks 4 --recompute full --zero 1
llama3.1-70b    llama3.1-70b      16 --pipe 4 --tensor 8 --chunks 20
llama3-8b       llama3-8b         32 --pipe 8 --tensor 2 --chunks 4 --microbatch-size 2
llama2-7b-pipe  llama2-7b         32 --pipe 8 --chunks 4 --microbatch-size 2
llama3-8b-fp8   llama3-8b         32 --pipe 4 --tensor 2 --schedule 1f1b --matmul-dtype fp8
13b-fp8         gpt3-13b          64 --pipe 2 --tensor 4 --chunks 2 --matmul-dtype fp8
13b-none        gpt3-13b          64 --pipe 2 --tensor 4 --chunks 2 --recompute none
6.7b-none-b2    gpt3-6.7b         64 --pipe 4 --tensor 2 --microbatch-size 2 --schedule 1f1b --recompute none
# runs that no term of the memory model was read from
[memory, held out] --attention xla --vocab-parallel tensor
llama2-7b-b2    llama2-7b         16 --pipe 4 --tensor 2 --chunks 2 --microbatch-size 2
6.7b-none-data  gpt3-6.7b         32 --data 2 --pipe 4 --tensor 4 --chunks 2 --microbatch-size 2 --recompute none
13b-1f1b        gpt3-13b         128 --data 2 --pipe 4 --tensor 4 --microbatch-size 4 --schedule 1f1b
gpt2-large-1f1b gpt2-large        64 --data 4 --pipe 2 --microbatch-size 2 --schedule 1f1b
6.7b-zb_v       gpt3-6.7b          8 --pipe 4 --tensor 4 --chunks 2 --schedule zb_v --recompute none
145.6b-chunks   megatron-145.6b  256 --data 2 --pipe 16 --tensor 8 --chunks 5 --microbatch-size 2
529.6b-eager    megatron-529.6b  240 --data 4 --pipe 15 --tensor 8 --schedule eager_1f1b --recompute full
[memory, held out] --vocab-parallel tensor
145.6b-cudnn    megatron-145.6b  256 --data 2 --pipe 16 --tensor 8 --chunks 5 --microbatch-size 2 --vocab-parallel pipe
llama2-cudnn-b2 llama2-7b         16 --pipe 4 --tensor 2 --chunks 2 --microbatch-size 2
13b-1f1b-cudnn  gpt3-13b         128 --data 2 --pipe 4 --tensor 4 --microbatch-size 4 --schedule 1f1b
[memory, held out]
llama3-8b-eager llama3-8b         32 --pipe 2 --tensor 4 --microbatch-size 2 --schedule eager_1f1b --recompute none
13b-zero1       gpt3-13b          32 --data 2 --pipe 2 --tensor 8 --chunks 2 --recompute none --zero 1
llama3-8b-gpipe llama3-8b         16 --pipe 4 --tensor 2 --schedule gpipe --recompute full
2.7b-zb_h1      gpt3-2.7b         16 --pipe 4 --tensor 2 --schedule zb_h1 --recompute none
# Batches: 2104.04473 section 5.1 for 175B and 1T; 2005.14165 table 2.1 for 13B (1M tokens) and 6.7B (2M); 4M tokens for
# Llama 2 (2307.09288 table 1), also at 32k, and for Llama 3 as at its start (2407.21783 section 3.4.1); 16M tokens for 405B
# (2407.21783 table 4), which shards its optimizer state too.
[questions]
175b       gpt3-175b      1536  --gpus 1024 --gpu a100-80gb
1t         gpt3-1t        3072  --gpus 3072 --gpu h100-80gb
llama2-7b  llama2-7b      1024  --gpus 8 --gpu h100-80gb
llama3-8b  llama3-8b       512  --gpus 8 --gpu h100-80gb
13b        gpt3-13b        512  --gpus 64 --gpu a100-80gb
6.7b       gpt3-6.7b      1024  --gpus 8 --gpu a100-80gb
32k        llama2-7b       128  --gpus 64 --gpu h100-80gb --sequence-length 32768
405b       llama3.1-405b  2048  --gpus 8192 --gpu h100-80gb --zero 0 1
13b-40gb   gpt3-13b        512  --gpus 8 --gpu a100-40gb
# only their account is printed, as that of some of [time]
[account]
175b-xla           gpt3-175b 64 --tensor 8 --pipe 8 --chunks 3 --latency-estimates xla
175b-roofline      gpt3-175b 64 --tensor 8 --pipe 8 --chunks 3 --latency-estimates roofline
zb_v-short         gpt3-175b 16 --tensor 8 --pipe 8 --schedule zb_v --chunks 2
interleaved-short  gpt3-175b 16 --tensor 8 --pipe 8 --chunks 2
"""


def _sets() -> dict[str, dict[str, str]]:
    """The command lines of the table, by set and name."""
    found: dict[str, dict[str, str]] = {}
    for line in TABLE.strip().splitlines():
        if line[0] == "[":
            name, _, more = line[1:].partition("]")
            table = found.setdefault(name, {})
        elif line[0] != "#":
            name, model, batch, own = line.split(maxsplit=3)
            table[name] = f"--model {model} --global-batch-size {batch}{more} {own}"
    return found


SETS = _sets()
SETS["account"] |= {name: SETS["time"][name] for name in ("175b", "175b-1f1b", "175b-zb_v", "llama2-7b", "one-gpu")}
