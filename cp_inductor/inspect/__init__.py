"""Tools that show what the compiler does: what will run on any rank and chip, and why.

    explain           reports what happens to every attention of a model
    cross_compile     generates the code of any rank, for any chip, without either
    doctor            checks the installation
    load              imports the function that the command line names

The others serve these: `world` and `pretend` (a process group and a device that do not exist),
`compile_for`, `retarget` and `targets` (code for a GPU that does not exist).
"""
