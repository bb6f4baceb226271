"""Budget in, certified network out."""
