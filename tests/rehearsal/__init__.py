"""Rehearse: run the programs of all ranks of a GPU job together, on the CPU.

    python -m tests.rehearsal model.py:build --world-size 4

It is how we know, without a GPU, that the programs that are generated for one compute what one
process computes, and touch nothing that they must not touch. Each rank is a process. Kernels run
under Triton's interpreter, on the memory of a pretended device; exchanges are real. Outputs, loss
and gradients are compared with one process, in float64 and in the model's own dtypes. Findings are

* a load or store outside its buffer, or at an address that is no multiple of the element's size;
* a read of memory that was never written, or of a receive buffer that was not waited for;
* a write to a buffer in flight, to an input of a forward graph; an exchange that is not waited for;
* memory of the host that a kernel or an exchange is given;
* an element that one lane of a launch reads and another one writes;
* what depends on masked lanes to which a load gives no value;
* an argument that is not the multiple of 16 that the code says it is; a failing assertion;
* what an attention kernel would refuse, or read wrongly: see `stand_ins`;
* ranks whose exchanges do not fit together, which raise.

Not seen this way are races between threads, shared memory, TMA and barriers; the rounding of tensor
cores, and of functions on the device; the flash, memory-efficient and matmul kernels themselves;
races between streams; other configurations than a kernel's first; what only large shapes show; and
speed.
"""
