"""mutants: what each constant of the contract is changed to, and the tests that must fail then.

Layer: tests. Data only. A test is "suite/test case/test". Where arithmetic uses a constant, two nets are named: the suite of
an op and the golden file of an op. What no arithmetic uses yet, or what the value of which moves no bit, is held by the
recorded text of `inspect`; `why` says so."""
from dataclasses import dataclass

INSPECT = "golden/manifest/inspect_is_the_recorded_text"

def golden(op):
    return f"golden/{op}/op_keeps_its_bits"


@dataclass(frozen=True)
class Mutant:
    name: str
    value: str
    tests: tuple
    partner: tuple = ()  # (text, text in its place) of the same header
    why: str = ""


def block(name, value, *more):
    return Mutant(name, value, ("linear/block and chain/block_equals_slow_form", golden("block"), *more))


def kda(name, value):
    return Mutant(name, value, ("kda/kda/equals_slow_form", golden("kda")))


def attention(name, value, test):
    return Mutant(name, value, (f"attn/attn/{test}", golden("attn")))


def draws(name, value):
    return Mutant(name, value, ("numeric/numeric/philox_known_answers", golden("rng")))


def function(name, value, why=""):
    return Mutant(name, value, (golden("fn"),), why=why)


CONTRACT = (
    Mutant("BI_CONTRACT_VERSION", "3", (INSPECT,), why="a name, not a number that is computed with"),
    block("BI_MMA_K", "8", golden("chain")),
    block("BI_MMA_FRACTION", "24", golden("chain")),
    block("BI_MMA_EXP_MIN", "(-132)"),
    Mutant("BI_LORA_RANK_PAD", "32", (INSPECT,), why="a block of zeros returns the accumulator: no padding moves a bit"),
    Mutant("BI_SUM_LANES", "512", ("numeric/numeric/sums", golden("sum"), golden("rmsnorm"))),
    Mutant("BI_SOFTPLUS_LINEAR", "12.0f", ("kda/kda/gate_equals_slow_form", golden("fn"), golden("kda_gate")),
           why="above 16 both forms round to x"),
    Mutant("BI_CONV_TAPS", "3", ("glu/glu, embed, conv/conv_survives_every_cut", golden("conv"))),
    kda("BI_KDA_LANES", "4"),
    kda("BI_KDA_KEYS", "2"),
    kda("BI_KDA_CHAINS", "1"),
    kda("BI_KDA_L2_EPS", "1e-5f"),
    attention("BI_ATT_BLOCK", "32", "equals_slow_form_dense"),
    attention("BI_ATT_PART", "1024", "several_parts"),
    Mutant("BI_IDX_AMAX_MIN", "1e-3f", (golden("index"),)),
    Mutant("BI_IDX_E4M3_MAX", "240.0f", ("index/index/scale_edges", golden("index"))),
    Mutant("BI_IDX_CHAINS", "8", ("index/index/odd_shapes", golden("index"))),
    Mutant("BI_IDX_PAIR", "1", ("index/index/odd_shapes", golden("index"))),
    Mutant("BI_ROUTE_SUM_EPS", "1e-19f", ("route/route/route_equals_slow_form", golden("route"))),
    Mutant("BI_HEAD_BLOCK", "64", ("head/score/score_equals_slow_form", golden("score"), golden("sample"))),
    Mutant("BI_HEAD_Z_MAX", "0x1p117f", ("head/score/score_equals_slow_form", golden("score"), "golden/bugs/bugs_stay_away")),
    Mutant("BI_SAMPLE_WEIGHT_BITS", "39", ("sample/cases/top_p_counts_single_units_of_weight", golden("sample"))),
    Mutant("BI_SAMPLE_P_BITS", "33", ("sample/slow form/sample_equals_slow_form", golden("sample"))),
    draws("BI_PHILOX_ROUNDS", "9"),
    draws("BI_PHILOX_MUL0", "0xd2511f55u"),
    draws("BI_PHILOX_MUL1", "0xcd9e8d59u"),
    draws("BI_PHILOX_WEYL0", "0x9e3779bbu"),
    draws("BI_PHILOX_WEYL1", "0xbb67ae87u"),
    draws("BI_RNG_PURPOSES", "128"),
    Mutant("BI_RNG_PURPOSE_SAMPLE", "1", ("sample/slow form/sample_equals_slow_form", golden("rng"), golden("sample"))),
)

# None: the last bit of the number. A threshold's last bit decides nothing, since both sides agree there; it moves further.
FUNCTIONS = (
    function("BI_FN_ROUND_MAGIC", "0x1.8p+22f", "its last bit moves no rounding: no product is half way between integers"),
    function("BI_FN_LOG2E", None),
    function("BI_FN_LN2_HI", None),
    function("BI_FN_LN2_LO", None),
    function("BI_FN_EXP_MIN", "-100.0f", "results are zero on both sides of its neighbours"),
    function("BI_FN_EXP_MAX", "88.0f", "results are Inf on both sides of its neighbours"),
    *(function(f"BI_FN_E{i}", None) for i in range(5)),
    function("BI_FN_LOG_CUT", "0x3f400000u", "on both sides of its neighbours the two reductions agree to the bit"),
    function("BI_FN_LOG_HALF", None),
    *(function(f"BI_FN_L{i}", None) for i in range(9)),
    function("BI_FN_LOG1P_CUT", "0.5f", "from 1 to 2 both differences are exact"),
    function("BI_FN_TANH_SMALL", "0.5f", "one input lies between it and its neighbour"),
    *(function(f"BI_FN_T{i}", None) for i in range(6)),
)

QUICK = ("BI_MMA_FRACTION", "BI_RNG_PURPOSE_SAMPLE", "BI_FN_E4")
