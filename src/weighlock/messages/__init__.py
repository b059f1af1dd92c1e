"""Objects as messages: small bytes that hold refs in place of tensors. No I/O."""
