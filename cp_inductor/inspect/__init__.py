"""Tools that show what the compiler does: what will run on any rank and chip, and why.

    explain           reports what happens to every attention of a model
    cross_compile     generates the code of any rank, for any chip, without either
    doctor            checks the installation

The others serve these: `world` (a call of a model, on a rank that does not exist), `pretend` (a
process group and a device that do not), `compile_for` (code for such a device).
"""
