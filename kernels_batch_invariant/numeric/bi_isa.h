/* bi_isa: the names of the oracle's three copies.
 *
 * Layer: numeric. A file of the oracle is compiled once for each instruction set, with BI_ISA = portable, avx2 or avx512,
 * and BI_ISA_portable, BI_ISA_avx2 or BI_ISA_avx512 defined beside it; BI_FN gives the functions of each copy names of
 * their own. */
#ifndef BI_ISA_H
#define BI_ISA_H

#define BI_JOIN_(name, isa) name##_##isa
#define BI_JOIN(name, isa) BI_JOIN_(name, isa)
#define BI_FN(name) BI_JOIN(name, BI_ISA)

#endif
