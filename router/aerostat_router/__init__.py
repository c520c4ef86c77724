"""The router: chooses the instance that serves a call, holds or sheds it; never executes or inspects tokens, decides no memory."""
