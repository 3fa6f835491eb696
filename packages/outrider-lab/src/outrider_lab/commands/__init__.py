"""Commands of `outrider` that this distribution brings, by entry points."""
